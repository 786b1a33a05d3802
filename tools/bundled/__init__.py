"""What a bundle holds of the tools: standard library only."""
