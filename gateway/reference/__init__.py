"""What the gateway tells about its own interface: the OpenAPI document and a page of it."""
