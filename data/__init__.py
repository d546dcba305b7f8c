"""Prompts and target outputs: the ground floor, which imports nothing else of this project."""
