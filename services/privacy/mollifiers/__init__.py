"""From the models' rows to what is sampled: shaping, the balls around the public model, and means in integers."""
