"""Recipe, training, pipeline, export and command line: the top floor, may import `evaluation` and `data`."""
