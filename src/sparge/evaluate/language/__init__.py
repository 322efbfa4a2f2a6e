"""Evaluate sparse attention in a language model against the same model with dense attention: `sparge eval llm`.

load          model and tokenizer from a hub name, a folder or a GGUF file; lengths at which they run sparse
texts         the text to evaluate on, split into windows
fidelity      next-token distributions of two runs: KL, agreement, perplexity
tasks         questions with known answers, generated from a seed
answers       ask one question: sparse prefill of the prompt, dense decoding of the answer, score
run           run everything for several variants, resumable
summary, page tables with intervals, HTML page
"""
