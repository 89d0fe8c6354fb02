"""What a model is judged for. numpy only: training, exporting and an edge device score with the same code."""
