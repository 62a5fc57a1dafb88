"""What only a machine with a GPU can tell: ``run.sh`` there, once for each product; its recording becomes a golden file."""
