"""Sizes of units."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

PIECES = {"piece": 1, "box": 12, "pallet": 480}


def pieces(movements: DataFrame) -> DataFrame:
    """Return every movement as a number of items, negative for outgoing goods."""
    size = F.create_map(*(F.lit(word) for pair in PIECES.items() for word in pair))
    sign = F.when(F.col("direction") == "out", -1).otherwise(1)
    return movements.select("item", (F.col("quantity") * size[F.col("unit")] * sign).cast("long").alias("pieces"))
