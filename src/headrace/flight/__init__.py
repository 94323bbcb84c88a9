"""Flight endpoint: topics as Arrow record batches over Arrow Flight, for readers and writers of millions of rows.

request.py      tickets, commands and actions (both sides)
errors.py       error encoding (both sides)
reading.py      stored batches → Arrow record batches, without a copy
writing.py      Arrow record batches → column batches
puts.py         the record batches of one DoPut, in order and pipelined
bridge.py       calls from Flight threads to the broker's event loop
calls.py        limits of concurrent calls and detection of stalled ones
connections.py  connection limits
sockets.py      closing connections of gRPC
server.py       Flight server: one handler per method
actions.py      handlers of DoAction
login.py        authentication: password → bearer token
endpoint.py     open and drain, allocator settings
client.py       blocking client, independent of the broker
"""
