"""The command line `privmix`: configuration, start and operation of a service."""
