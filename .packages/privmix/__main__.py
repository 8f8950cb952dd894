from privmix.cluster.cli import app

app()
