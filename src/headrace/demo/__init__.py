"""`headrace demo`: a broker, orders through every protocol, a pipeline on Spark, and a verification at the end."""
