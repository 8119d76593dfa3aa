"""The gateway's reference: the OpenAPI document and a page that shows it."""
