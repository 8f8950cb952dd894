"""What is attacked: ensembles built by hand with their exact distributions, and ensembles trained on planted text."""
