"""`distill bench`: our speed against peers' in one run, on the models of a recipe."""
