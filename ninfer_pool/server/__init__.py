"""An HTTP server in OpenAI's and Anthropic's shapes over one engine, with the pool in view."""
