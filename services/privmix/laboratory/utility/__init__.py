"""Owns `privmix evaluate task`: what synthetic text is worth for training a classifier. Start at `task.py`."""
