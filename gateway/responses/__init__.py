"""OpenAI's newer interface: responses, conversations and stored chats."""
