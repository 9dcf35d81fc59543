"""Recording: run a submission's host code without a GPU and write down what it asked for."""
