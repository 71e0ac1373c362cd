"""SmolLM2 text generation on top of the GroupQueryAttention operator."""
