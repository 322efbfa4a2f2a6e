"""What sparse attention does to a language model, against the same model dense: `sparge eval llm`.

load          model and tokenizer from a hub name, a folder or a GGUF file
texts         text to read, cut into windows
fidelity      next-token distributions of two runs: KL, agreement, perplexity, by position
tasks         questions with known answers, made from a seed: needles, many keys, many values, tracking, aggregation
collections   LongBench and InfiniteBench, from files or the hub
answers       one question asked: prompt sparse, answer dense, as in generation
run           all of it for a number of variants, resumable
summary, page what came out, as numbers with intervals and as a page
"""
