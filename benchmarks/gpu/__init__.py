"""What is asked of an NVIDIA card whenever one is at hand: one script per question, one JSON of figures each."""
