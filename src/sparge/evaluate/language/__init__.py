"""Evaluate sparse attention in a language model against the same model with dense attention: `sparge eval llm`.

load          model and tokenizer from a hub name, a folder or a GGUF file
texts         the text, cut into windows
lengths       which lengths go sparse on this device
fidelity      next-token distributions of two runs: KL, agreement, perplexity, by position
tasks         questions with known answers, made from a seed: needles, many keys, many values, tracking, aggregation
collections   LongBench and InfiniteBench, from files or the hub
answers       one question: sparse prefill of the prompt, dense decoding of the answer
run           all of it for several variants, resumable
summary, page results as numbers with intervals, and as a page
"""
