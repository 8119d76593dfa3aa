"""SGLang's and vLLM's own interfaces: generation, tokenization and server administration."""
