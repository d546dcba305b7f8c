"""The speculative decoder and everything measured with it: may import `data`, never `distill`."""
