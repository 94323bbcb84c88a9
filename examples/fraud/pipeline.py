"""Join of two streams: payments from another country than the login of the same user, within ten minutes of it.

headrace pipeline check examples/fraud/pipeline.py
headrace pipeline run examples/fraud/pipeline.py
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.spark.pipelines import Pipeline

pipeline = Pipeline("fraud", trigger="1 second", conf={"spark.sql.shuffle.partitions": 2})

pipeline.source(
    "logins",
    topic="logins",
    format="json",
    schema="user string, country string, at timestamp",
    watermark={"column": "at", "delay": "10 minutes"},
)
pipeline.source(
    "payments",
    topic="payments",
    format="json",
    schema="user string, country string, cents long, at timestamp",
    watermark={"column": "at", "delay": "10 minutes"},
)


@pipeline.step
def suspects(logins: DataFrame, payments: DataFrame) -> DataFrame:
    """Return suspicious payments. The watermarks limit how long each side is kept, so that the state does not grow without limit."""
    login, payment = logins.alias("login"), payments.alias("payment")
    is_near = F.expr("payment.at between login.at and login.at + interval 10 minutes")
    return (
        payment.join(login, (F.col("payment.user") == F.col("login.user")) & is_near)
        .where("payment.country <> login.country")
        .selectExpr(
            "payment.user as user",
            "login.country as logged_in_from",
            "payment.country as paid_from",
            "payment.cents as cents",
        )
    )


pipeline.sink("suspects", "suspects", kind="topic", topic="payments.suspect", key="user")
