from cluster.cli import app

app()
