"""What tests share: models, ranks, doubles, comparisons."""
