"""SGLang's and vLLM's own interfaces: generate, tokenize, and what operates a server."""
