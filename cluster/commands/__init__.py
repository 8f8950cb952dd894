"""Owns the verbs of `privmix`, each in a file of its name. A verb imports what it runs when it runs."""
