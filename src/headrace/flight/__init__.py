"""The Flight endpoint: topics as Arrow record batches over Arrow Flight, both ways, for readers and writers of millions of rows.

request.py    what tickets, commands and actions hold (both sides)
fault.py      how an error travels (both sides)
reading.py    batches of the log → record batches, without a copy
writing.py    record batches → runs of the log
puts.py       record batches of one put, in order and in flight
bridge.py     from a Flight thread to the broker's loop and back
calls.py      how many calls there are, and which of them stall
lines.py      ending the connection of one that does
server.py     the Flight server: one handler for each verb
login.py      who a caller is: password → bearer token
lane.py       its life: open, drain
client.py     the same verbs from the other side; knows nothing of the broker
"""
