"""Text in, token ids out, and back: tokenizer, chat template, detokenizer, stop strings."""
