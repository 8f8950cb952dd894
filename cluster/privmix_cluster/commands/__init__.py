"""Owns the verbs of `privmix`, each in a file of its name: options, help and messages. Heavy work is elsewhere."""
