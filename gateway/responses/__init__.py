"""OpenAI's newer interface: responses, without the stored ones."""
