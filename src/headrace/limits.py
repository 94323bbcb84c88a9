"""Limits, each with its unit in its name. Exceeding one returns a clear error in the form of the protocol."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Records
VALUE_BYTES_MAX: Final = 32 * MIB
KEY_BYTES_MAX: Final = 64 * KIB
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 8 * KIB
"""Names and values of all headers of one record."""

# Topics and partitions
TOPIC_NAME_BYTES_MAX: Final = 249
PARTITIONS_PER_TOPIC_MAX: Final = 1_000
PARTITIONS_MAX: Final = 10_000
"""Partitions of all topics of a broker, without internal ones."""
GROUP_NAME_BYTES_MAX: Final = 249

# The log
BATCH_BYTES_TARGET: Final = 1 * MIB
"""Batches are split at this size, so that a small fetch never has to read a huge batch."""
LARGE_APPEND_BYTES: Final = 4 * MIB
"""From this size on, the records that a flush adds to one partition are written once, to the segment, and the journal refers to them.
A smaller append is faster through the journal, with one sync instead of two."""
BATCH_JOINED_BYTES_MAX: Final = 256 * KIB
"""Small batches are joined up to this size when they are written to a segment: large enough that headers take no space, small enough for a
read of a few records."""
BATCH_BYTES_MAX: Final = 64 * MIB
"""A batch header with a larger size is rejected before anything is allocated."""
BATCH_RECORDS_MAX: Final = 1 << 20
FRAME_BYTES_MAX: Final = 1024 * MIB
"""Size of one journal frame, and therefore of one transaction."""
READ_BATCHES_MAX: Final = 256
"""A read ends after this many batches, whatever it asked for: where batches are tiny, a megabyte of them takes many milliseconds."""
OPENED_BATCHES_BYTES_MAX: Final = 64 * MIB
"""Memory for opened batches, over all logs. A reader that returns to a batch in it reads and verifies nothing."""
LOG_DESCRIPTORS_RESERVED: Final = 32
"""File descriptors that the log reserves for its own files, for use when connections have taken all others."""

# Broker
TRANSACTION_BYTES_MAX: Final = 256 * MIB
TRANSACTIONS_OPEN_MAX: Final = 10_000
FLYMQ_TRANSACTIONS_MAX: Final = 1_000
"""Open transactions of one FlyMQ connection, so that one client cannot take all of `TRANSACTIONS_OPEN_MAX`."""
STAGED_MEMORY_BYTES_MAX: Final = 160 * MIB
"""Memory for all stages of exactly-once writers, unless configured. The rest of the staged records is on disk."""
PUBLICATION_BYTES_MAX: Final = 512 * MIB
"""Upper limit of a publication in one append, whatever memory is configured. Encoded, it fits into a journal frame."""
STAGES_MAX: Final = 10_000
"""Unpublished stages."""
STAGE_IDLE_MS_MAX: Final = 6 * 3600 * 1000
"""A stage is dropped when its writer has staged and sealed nothing for this time."""
STAGE_STRAGGLER_MS: Final = 600_000
"""Minimum age at which a stage is dropped as abandoned, once its writer has published twice without it."""
STAGES_REMEMBERED_MAX: Final = 65_536
"""Handles of published, dropped and expired stages that the broker remembers."""
WRITERS_MAX: Final = 100_000
"""Exactly-once writers whose last version the broker remembers."""
WRITER_IDLE_MS: Final = 30 * 24 * 3600 * 1000
"""The broker forgets a writer that has published nothing for this time."""
WRITER_EPOCHS_REMEMBERED: Final = 16
"""Superseded epochs of one writer that get `stale_epoch`."""
WRITER_TOPICS_REMEMBERED: Final = 64
"""Topics of the last publication that the row of a writer names. A principal acting for the writer needs publish rights for all of them."""
WRITER_VERSION_FIRST_MAX: Final = 1 << 61
"""First version of a writer: above any counter, and above any time in nanoseconds for the next decades."""
WRITER_VERSION_SKIP_MAX: Final = 10_000_000
"""Largest step from one version to the next; or the previous version itself, if larger, which leaves room for dates and times."""
FETCH_BYTES_MAX: Final = 32 * MIB
FETCH_WAIT_MS_MAX: Final = 60_000
GROUPS_MAX: Final = 50_000
PRODUCER_BATCHES_REMEMBERED: Final = 5
"""Latest batches per partition that an idempotent producer may resend."""
DEAD_LETTER_ERROR_BYTES_MAX: Final = 1 * KIB
"""Error text that a dead letter keeps."""
DEAD_LETTERS_REPLAYED_MAX: Final = 1_000
"""Dead letters of one replay request."""
DEAD_LETTERS_MOVED_MAX: Final = 10_000
"""Records that one request moves to the dead letters."""
DEAD_LETTERS_REMEMBERED_MAX: Final = 1_000_000
"""Dead letters whose origin is kept in memory, over all topics except the one being added to."""
DELAYED_MAX: Final = 100_000
"""Pending delayed messages."""
DELAYED_LIST_MAX: Final = 10_000
"""Delayed messages in one reply. More would block the event loop for longer than a message may be late."""
DELAYED_BYTES_MAX: Final = 256 * MIB
"""Total size of pending delayed messages, which are in memory as well as on disk."""
DELAYED_RECORD_BYTES_MAX: Final = 16 * MIB
DELAY_MS_MAX: Final = 366 * 24 * 3600 * 1000
IN_FLIGHT_MAX: Final = 5_000
"""Unsettled records of one member of a group."""

# Network
FRAME_BYTES_DEFAULT_MAX: Final = 32 * MIB + 64 * KIB
CONNECTIONS_MAX: Final = 10_000
CONNECTIONS_PER_IP_MAX: Final = 2_048
CONNECTIONS_PER_USER_MAX: Final = 2_048
CONNECTIONS_RESERVED: Final = 8
"""Connections reserved for administrators when access control is enforced."""
HANDSHAKE_SECONDS_MAX: Final = 5.0
LOGIN_SECONDS_MAX: Final = 10.0
"""Time until login, when access control is enforced and anonymous access is not allowed."""
ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Pause of accepting connections after file descriptors or memory ran out."""
FILES_RESERVED_MIN: Final = 128
"""File descriptors not available to connections: a quarter of all, and at least this many."""
OUTPUT_TOTAL_BYTES_MAX: Final = 256 * MIB
"""Unsent bytes of all peers together."""
OUTPUT_FREE_BYTES: Final = 16 * KIB
"""Unsent bytes of one connection that do not count towards the total."""
OUTPUT_CHECK_SECONDS: Final = 1.0
"""Interval at which the total is computed."""
OUTPUT_STALL_SECONDS: Final = 5.0
"""While the total is above its limit, a peer that has read nothing for this time is disconnected."""
OUTPUT_BUFFER_BYTES_MAX: Final = 4 * MIB
"""Unsent bytes of one peer. Above this the server stops reading from the peer too, so that further requests cannot add replies."""
OUTPUT_HIGH_WATER_BYTES: Final = 256 * KIB
"""Unsent bytes above which a peer gets no more deliveries: a PONG or an ACK never waits behind more than this and one delivery."""
OUTPUT_LOW_WATER_BYTES: Final = 64 * KIB
"""Unsent bytes at which deliveries resume."""
LINGER_SECONDS_MAX: Final = 5.0
"""Time in which a closed connection must accept its last bytes."""
RELAY_WAIT_SECONDS_MAX: Final = 10.0
"""Time in which a request for the coordinator waits for one, before it fails. Another broker takes over within 10 s."""
RELAY_CONNECT_SECONDS_MAX: Final = 3.0
"""Time in which the coordinator must accept a connection and its login."""
RELAY_RETRY_SECONDS: Final = 0.25
"""Pause after a failed connection to the coordinator."""
RELAY_BUFFER_BYTES: Final = 64 * KIB
"""Bytes for the coordinator above which the peer of a relay is not read."""
ERROR_PAUSE_SECONDS: Final = 0.5
"""Delay before a connection of a protocol without error frames is closed for an error, so that a client that reconnects at once does so
twice a second. None while half of the connections are in use: the pause keeps a slot."""
END_LINES_PER_MINUTE_MAX: Final = 5
"""Log lines about connections that one address ended, or that were closed, for the same reason."""
IDLE_SECONDS_MAX: Final = 30.0
"""A peer that has sent pings before and then sends nothing for this time counts as disconnected."""
FRAME_CHECK_SECONDS: Final = 15.0
"""Interval at which unfinished frames are checked. Between checks a frame must grow by `FRAME_BYTES_PER_SECOND_MIN`."""
FRAME_BYTES_PER_SECOND_MIN: Final = 1 * KIB
"""Minimum rate at which a peer must send the rest of a frame."""
UNFINISHED_BYTES_MAX: Final = 512 * MIB
"""Bytes received of unfinished frames, all connections together."""
UNFINISHED_BYTES_FREE: Final = 64 * KIB
"""An unfinished frame up to this size does not cause a disconnect when the total is exceeded."""
IN_FLIGHT_BYTES_MAX: Final = 4 * MIB
"""Published but unacknowledged bytes of one connection. Above this the server stops reading from its socket."""
SUBSCRIPTIONS_PER_CONNECTION_MAX: Final = 1_024

# BlipMQ
BLIPMQ_FRAME_BYTES_MAX: Final = 16 * MIB
"""Maximum of the length field of a frame, inclusive."""
BLIPMQ_LOGIN_FRAME_BYTES_MAX: Final = 9 + 2 + 65_535
"""The same before AUTH has succeeded: the size of the longest AUTH."""
BLIPMQ_BAD_KEYS_MAX: Final = 5
"""Wrong keys on one connection; the last one closes it."""
BLIPMQ_REPLIES_OWED_MAX: Final = 4_096
"""Replies of one connection that wait for earlier publishes to be durable. Above this the server stops reading from its socket."""
BLIPMQ_SUBSCRIPTIONS_MAX: Final = 20_000
"""Subscriptions of all connections, including those whose connection is closed."""

# Figg
FIGG_TOPIC_BYTES_MAX: Final = 1 * KIB
"""Size of the topic field of a frame. The broker checks the name itself."""

# RustLog
RUSTLOG_FRAME_BYTES_MAX: Final = 10 * MIB
"""The payload of one frame in either direction; inclusive."""
RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX: Final = 8 * KIB
"""The payload of one frame from a peer that has no right at all, where access is enforced; inclusive."""
RUSTLOG_DECODE_STEP_BYTES: Final = 64 * KIB
"""JSON records that are decoded in one turn of the event loop. Those of a larger Produce are decoded in several."""
RUSTLOG_PRODUCE_RECORDS_MAX: Final = 250_000
"""Records of one Produce: this many offsets of 20 digits still fit the JSON reply."""
RUSTLOG_REPLY_BYTES_MAX: Final = OUTPUT_BUFFER_BYTES_MAX - OUTPUT_HIGH_WATER_BYTES
"""Reply to a Fetch with more than one record. It fits the output buffer of a peer together with the unsent bytes before it."""
FETCHES_AT_ONCE_MAX: Final = 16
"""Concurrent fetches of all FlyMQ and RustLog connections. Their memory does not count as output yet."""
TURN_BYTES_MIN: Final = 64 * KIB
"""Reply payload from which a connection waits for its turn before encoding."""
RUSTLOG_ERROR_CHARS_MAX: Final = 8_192
"""Longer error texts are truncated: they may quote a name of megabytes, and must fit a frame and a u16 length."""
RUSTLOG_REQUESTS_IN_FLIGHT_MAX: Final = 1_024
"""Pipelined Produce requests of one connection that are not yet on disk. Above this the server stops reading from its socket."""
RUSTLOG_STALL_SECONDS_MAX: Final = 30.0
"""Time for which a peer may pause in the middle of a frame."""
RUSTLOG_STRAY_OFFSETS_MAX: Final = 10_000
"""Committed offsets of topics that do not exist, all connections together."""

# FlyMQ
FLYMQ_PAYLOAD_BYTES_MAX: Final = 32 * MIB
"""Payload of one frame, and size of a compressed payload after decompression: the specification's maximum message size."""
FLYMQ_LOGIN_INFLATED_BYTES_MAX: Final = 8 * KIB
"""Decompressed size of a payload before login, when access control is enforced."""
FLYMQ_LOOP_INFLATED_BYTES_MAX: Final = 64 * KIB
"""Decompressed size of a payload on the event loop. A larger one is decompressed on a thread."""
FLYMQ_LOOP_INFLATED_BYTES_TOTAL: Final = 1 * MIB
"""The same for all payloads of one received chunk, before other connections are served."""
FLYMQ_INFLATIONS_MAX: Final = 2
"""Payloads decompressed on threads at the same time: one per connection, this many in total."""
FLYMQ_FETCH_BYTES_MAX: Final = 4 * MIB
"""FETCH reply of more than one record. A single record may fill the frame."""
FLYMQ_SCAN_BYTES_MAX: Final = 256 * MIB
"""Bytes that a FETCH with a filter scans for its first record."""

# Fujin
FUJIN_NAME_BYTES_MAX: Final = 1 * KIB
"""Name of a writer or reader, and a writer id. The configuration maps names to topics."""
FUJIN_MESSAGE_BYTES_MAX: Final = 1 * MIB
"""Value of one WRITE, inclusive. A longer one is skipped and answered with an error."""
FUJIN_ID_BYTES_MAX: Final = 1 * KIB
"""Message id in an ACK or NACK. Those of this broker are far shorter."""
FUJIN_IDS_MAX: Final = 65_536
"""Message ids in one ACK or NACK."""
FUJIN_FETCH_RECORDS_MAX: Final = 5_000
"""Messages in one FETCH reply, even if the request asks for more."""
FUJIN_FETCHES_MAX: Final = 1_024
"""Pending FETCHes of one stream. Above this the server stops reading from the stream."""
FUJIN_ERROR_BYTES_MAX: Final = 8 * KIB
"""Longer error texts are truncated."""

# QUIC
QUIC_STREAM_WINDOW_BYTES: Final = 1 * MIB
"""Unconsumed bytes of one stream."""
QUIC_CONNECTION_WINDOW_BYTES: Final = 16 * MIB
"""Unconsumed bytes of all streams of one connection."""
QUIC_STREAMS_MAX: Final = 1_000
"""Open streams of one connection."""
QUIC_UNPROVEN_MAX: Final = 100
"""Unfinished handshakes on one listener, above which clients must validate their address."""
QUIC_PING_SECONDS: Final = 5.0
"""Interval from the reply to one ping until the next ping."""
QUIC_PONG_SECONDS_MAX: Final = 5.0
"""Time in which a peer must reply to a ping."""

# Flight endpoint
FLIGHT_CONNECTIONS_MAX: Final = 1_024
"""Open connections to the Flight endpoint."""
FLIGHT_REQUEST_BYTES_MAX: Final = 4 * MIB
"""Size of a ticket, a command or an action body."""
FLIGHT_READ_ROWS_MAX: Final = 1 << 20
"""Rows of one record batch that is read, even if the reader asks for more."""
FLIGHT_BATCH_BYTES_TARGET: Final = 16 * MIB
"""Keys and values of one record batch that is sent; a single larger record is sent alone."""
FLIGHT_READ_AHEAD_BYTES: Final = 4 * BATCH_BYTES_TARGET
"""Read-ahead from the log while earlier batches are being sent. A reader holds about twice this. Batches of a topic that was filled in
bulk have up to the target size, so that none of them is cut."""
LOCATED_BATCHES_MAX: Final = 256
"""Batches whose position in files a reader gets at once: each costs the broker about 30 µs."""
LOCATED_BYTES_MAX: Final = 32 * MIB
"""Their size in total. The reader may still read them after the topic was deleted, or after it has lost the permission."""
FLIGHT_IN_FLIGHT_BYTES_MAX: Final = 16 * MIB
"""Bytes of one put that are not yet on disk. Above this the server stops reading from its connection."""
FLIGHT_IN_FLIGHT_BYTES_MIN: Final = 4 * MIB
"""The same when many puts run at the same time."""
FLIGHT_IN_FLIGHT_BYTES_TOTAL: Final = 256 * MIB
"""The same for all puts together, provided that each has the minimum."""
FLIGHT_SCHEMAS_BYTES_MAX: Final = 1 * MIB
"""Size of the other schema versions in a reply."""
FLIGHT_PUT_ROWS_MAX: Final = 1 << 24
"""Rows of one record batch that is put: rows of nulls take no bytes in transfer."""
FLIGHT_UNPACKED_BYTES_MAX: Final = 256 * MIB
"""Decoded size of a column of one record batch that is put: a dictionary encodes a large value in four bytes."""
FLIGHT_CALLS_MAX: Final = 128
"""Concurrent calls, each on its own thread."""
FLIGHT_CALLS_RESERVED: Final = 8
"""Additional calls reserved for administrators."""
FLIGHT_OPENING_CALLS_MAX: Final = 32
"""Calls whose peer has sent its headers and no message yet. Each holds a thread."""
FLIGHT_OPENING_SECONDS_MAX: Final = 10.0
"""Time from the headers of such a call to its first message. After it the server closes the connection."""
FLIGHT_CHECK_SECONDS: Final = 1.0
"""Interval at which the Flight endpoint counts its connections."""
FLIGHT_LOGINS_PENDING_MAX: Final = 10_000
"""Logins without a call yet. The oldest is dropped first."""
FLIGHT_LOGIN_PENDING_SECONDS_MAX: Final = 60.0
"""Time from a login to its first call."""
FLIGHT_STALL_SECONDS_MAX: Final = 600.0
"""Time for which a call may wait for a peer that neither reads nor writes, while another call waits for its slot. A task that is busy with
its next rows must not lose its call, because it would only reconnect and displace another."""
FLIGHT_WAITS_MAX: Final = 96
"""Concurrent calls that wait for new records. The remaining slots are for calls with work to do."""
FLIGHT_TOKENS_MAX: Final = 10_000
"""Valid login tokens. The oldest is dropped first."""
FLIGHT_TOKEN_SECONDS_MAX: Final = 3_600.0
"""Lifetime of a login token."""

# Schemas
SCHEMA_BYTES_MAX: Final = 256 * KIB
"""Size of the definition of one version."""
SCHEMA_DEPTH_MAX: Final = 64
"""Nesting depth of a definition."""
SCHEMA_PARTS_MAX: Final = 10_000
"""Parts of a definition, each counted once per reference: the maximum cost of one value in steps of the validator."""
SCHEMA_COMPARISONS_MAX: Final = 20_000
"""Pairs of parts compared to prove two versions compatible. If more are needed, the versions count as incompatible."""
SCHEMA_VERSIONS_MAX: Final = 1_000
"""Versions of one schema."""
SCHEMAS_MAX: Final = 10_000
"""Versions of all schemas together."""
SCHEMA_FAULTS_MAX: Final = 8
"""Reported faults of one invalid value."""
SCHEMA_VALUE_DEPTH_MAX: Final = 100
"""Nesting depth of an Avro or Protobuf value."""
SCHEMA_LOOP_STEPS_MAX: Final = 2_000_000
"""Steps of about 5 ns for checking the values of one request on the event loop. A separate process checks values that may take more."""
SCHEMA_LOOP_DEFINITION_BYTES_MAX: Final = 4 * KIB
"""Definition size up to which the event loop compiles and compares. The separate process handles a longer one first."""
SCHEMA_CHECK_CPU_SECONDS_MAX: Final = 2
"""Processor time of that process for one check. A value that takes longer is invalid."""
SCHEMA_CHECK_SECONDS_MAX: Final = 30.0
"""Elapsed time of one check, on a busy machine."""
SCHEMA_CHECK_MEMORY_BYTES_MAX: Final = 512 * MIB
"""Address space of that process."""
SCHEMA_CHECKS_WAITING_MAX: Final = 64
"""Queued checks for that process. Further ones get a retriable error."""
SCHEMA_CHECKS_BYTES_MAX: Final = 128 * MIB
"""Values queued for a check, and checked values that are not published yet."""
SCHEMA_COMPILE_MS_MAX: Final = 500
"""Processor time for compiling one definition."""
JSON_VALUE_DEPTH_MAX: Final = 500
"""Nesting depth of a JSON value that has a schema. The limit of the parser differs between Python versions."""

# Access
USERS_MAX: Final = 100_000
ROLES_MAX: Final = 1_000
RULES_MAX: Final = 100_000
API_KEYS_MAX: Final = 100_000
SCOPES_PER_KEY_MAX: Final = 100
PASSWORD_CHARACTERS_MIN: Final = 8
PASSWORD_BYTES_MAX: Final = 1_024
PASSWORD_JOBS_RUNNING: Final = 2
"""Passwords hashed at the same time, each on its own thread."""
PASSWORD_JOBS_QUEUED_MAX: Final = 64
"""Passwords queued for hashing. Further ones get a retriable error at no cost."""
LOGIN_PAUSE_MS_MAX: Final = 30_000
"""Longest pause after wrong passwords, so that guessing locks an account out for no longer."""
LOGINS_REMEMBERED_MAX: Final = 10_000
"""Accounts, and addresses, whose failed logins the broker remembers."""
AUDIT_EVENTS_WAITING_MAX: Final = 1_000
"""Audit events not yet on disk. Above this, denials are counted instead of listed. Access changes are never dropped."""
AUDIT_QUERY_EVENTS_MAX: Final = 10_000
"""Events in one query result."""

# Cost of a request
REQUEST_CPU_MS_MAX: Final = 500
"""Processor time of the broker for a request of any size."""
REQUEST_CPU_NS_PER_BYTE_MAX: Final = 1_000
"""Addition for each byte of the request."""
REQUEST_MEMORY_BYTES_MAX: Final = 128 * MIB
"""Memory of the broker for a request of any size."""
REQUEST_MEMORY_BYTES_ANONYMOUS_MAX: Final = 16 * MIB
"""The same for a peer without login, when access control is enforced."""
REQUEST_MEMORY_BYTES_PER_BYTE_MAX: Final = 64
"""Addition for each byte of the request."""
