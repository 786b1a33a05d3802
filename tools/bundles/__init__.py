"""The catalogue of patches, and what is made of it: the bundle, its files and their places, the guard."""
