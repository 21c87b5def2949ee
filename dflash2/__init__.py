"""DFlash2 speculative decoding: the speculator."""
