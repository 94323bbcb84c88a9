"""The story that `headrace demo` tells: a broker, orders through every door, a pipeline on Spark, and a reckoning at the end."""
