from privmix_cluster.cli import app

app()
