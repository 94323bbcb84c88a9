"""The story that `headrace demo` tells: a broker, orders through every protocol, a pipeline on Spark, and a reckoning at the end."""
