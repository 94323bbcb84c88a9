"""Every limit has its number here, with its unit in its name. One more gets a clear error in the protocol's own form."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Records
VALUE_BYTES_MAX: Final = 32 * MIB
KEY_BYTES_MAX: Final = 64 * KIB
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 8 * KIB
"""All header names and values of one record together."""

# Topics and partitions
TOPIC_NAME_BYTES_MAX: Final = 249
PARTITIONS_PER_TOPIC_MAX: Final = 1_000
PARTITIONS_MAX: Final = 10_000
GROUP_NAME_BYTES_MAX: Final = 249

# The log
BATCH_BYTES_TARGET: Final = 1 * MIB
"""A batch is cut here, so that a small fetch never drags in a huge one."""
BATCH_BYTES_MAX: Final = 64 * MIB
"""No batch header may claim more: a lying length is refused before anything is allocated."""
BATCH_RECORDS_MAX: Final = 1 << 20
FRAME_BYTES_MAX: Final = 1024 * MIB
"""One journal frame, and so one transaction."""
LOG_DESCRIPTORS_RESERVED: Final = 32
"""Descriptors that the log holds in reserve for its own files, for when connections have taken all others."""

# Broker
TRANSACTION_BYTES_MAX: Final = 256 * MIB
TRANSACTIONS_OPEN_MAX: Final = 1_000
FLYMQ_TRANSACTIONS_MAX: Final = 100
"""Open ones of one FlyMQ connection: no client takes all that there may be."""
STAGED_MEMORY_BYTES_MAX: Final = 256 * MIB
"""What all stages of exactly-once writers hold in memory together; the rest of them is on disk."""
STAGES_MAX: Final = 10_000
"""Stages that wait to be published."""
STAGE_IDLE_MS_MAX: Final = 6 * 3600 * 1000
"""A stage is dropped when its writer has staged and sealed nothing for so long."""
STAGE_STRAGGLER_MS: Final = 600_000
"""How old a stage is that its writer has published past twice, before it counts as left behind."""
STAGES_REMEMBERED_MAX: Final = 65_536
"""Handles of stages that are gone, and stay so."""
SINK_APPS_MAX: Final = 100_000
"""Exactly-once writers whose last version is remembered."""
SINK_IDLE_MS: Final = 30 * 24 * 3600 * 1000
"""One that has published nothing for so long is forgotten."""
SINK_EPOCHS_REMEMBERED: Final = 16
"""Superseded runs of one writer that are told so."""
SINK_TOPICS_REMEMBERED: Final = 64
"""Topics of its last publication that a writer's row names: whoever acts for the writer may publish to all of them."""
SINK_VERSION_FIRST_MAX: Final = 1 << 61
"""The first version of a writer: beyond any count, and beyond any time in nanoseconds for the next decades."""
SINK_VERSION_SKIP_MAX: Final = 10_000_000
"""How far a version may lie ahead of the one before it; or as far as that one lies ahead of zero, which leaves room for dates and times."""
FETCH_BYTES_MAX: Final = 32 * MIB
FETCH_WAIT_MS_MAX: Final = 60_000
GROUPS_MAX: Final = 50_000
PRODUCER_EPOCHS_REMEMBERED: Final = 5
"""How many of its latest runs per partition an idempotent producer may resend."""
DEAD_LETTER_ERROR_BYTES_MAX: Final = 1 * KIB
"""What a dead letter keeps of the words of whoever refused it."""
DEAD_LETTERS_REPLAYED_MAX: Final = 1_000
"""Dead letters of one replay."""
DEAD_LETTERS_MOVED_MAX: Final = 10_000
"""Records of one move to the dead letters."""
DEAD_LETTERS_REMEMBERED_MAX: Final = 1_000_000
"""Dead letters whose origin is held in memory, of all topics but the one that is being added to."""
DELAYED_MAX: Final = 100_000
"""Delayed messages that wait for their time."""
DELAYED_LIST_MAX: Final = 10_000
"""Of them in one answer: more would keep the loop busy for longer than a message may be late."""
DELAYED_BYTES_MAX: Final = 256 * MIB
"""What they may hold together: they wait in memory as well as on disk."""
DELAYED_RECORD_BYTES_MAX: Final = 16 * MIB
DELAY_MS_MAX: Final = 366 * 24 * 3600 * 1000
IN_FLIGHT_MAX: Final = 5_000
"""Deliveries of one settlement queue that may wait for an ack at once."""

# Network
FRAME_BYTES_DEFAULT_MAX: Final = 32 * MIB + 64 * KIB
CONNECTIONS_MAX: Final = 10_000
CONNECTIONS_PER_IP_MAX: Final = 2_048
CONNECTIONS_PER_USER_MAX: Final = 2_048
CONNECTIONS_RESERVED: Final = 8
"""Of all connections, those that only administrators may keep. They are there where access is enforced."""
HANDSHAKE_SECONDS_MAX: Final = 5.0
LOGIN_SECONDS_MAX: Final = 10.0
"""How long a connection may be without a login, where access is enforced and nothing is allowed without one."""
ACCEPT_PAUSE_SECONDS: Final = 0.5
"""How long no connection is accepted after file descriptors or memory ran out."""
FILES_RESERVED_MIN: Final = 128
"""File descriptors that connections leave to the log and the process; a quarter of all, but not less than this."""
OUTPUT_TOTAL_BYTES_MAX: Final = 256 * MIB
"""What may wait unsent for all peers together."""
OUTPUT_FREE_BYTES: Final = 16 * KIB
"""Unsent bytes of one connection that are not counted for the sum of all."""
OUTPUT_CHECK_SECONDS: Final = 1.0
"""How often the sum is counted anew."""
OUTPUT_STALL_SECONDS: Final = 5.0
"""A peer that has taken nothing for so long is disconnected when the sum is above its bound."""
OUTPUT_BUFFER_BYTES_MAX: Final = 4 * MIB
"""What may wait unsent for one peer; above it the peer is not read either, so that its requests cannot grow the answers."""
OUTPUT_HIGH_WATER_BYTES: Final = 256 * KIB
"""Unsent bytes above which a peer is not fed: a PONG or an ACK never waits behind more than this and one delivery."""
OUTPUT_LOW_WATER_BYTES: Final = 64 * KIB
"""Unsent bytes at which a peer is fed again."""
LINGER_SECONDS_MAX: Final = 5.0
"""How long a closed connection may take to accept its last bytes."""
IDLE_SECONDS_MAX: Final = 30.0
"""A peer that used to send pings and then says nothing for this long is gone."""
FRAME_CHECK_SECONDS: Final = 15.0
"""How often an unfinished frame is looked at; in between it has to grow by `FRAME_BYTES_PER_SECOND_MIN`."""
FRAME_BYTES_PER_SECOND_MIN: Final = 1 * KIB
"""A peer that sends the rest of a frame more slowly than this only holds on to its connection."""
UNFINISHED_BYTES_MAX: Final = 512 * MIB
"""What has come of unfinished frames, on all connections together."""
UNFINISHED_BYTES_FREE: Final = 64 * KIB
"""An unfinished frame up to this size is never blamed for the sum of all of them."""
IN_FLIGHT_BYTES_MAX: Final = 16 * MIB
"""Published but unacknowledged bytes of one connection before its socket is no longer read."""
SUBSCRIPTIONS_PER_CONNECTION_MAX: Final = 1_024

# BlipMQ
BLIPMQ_FRAME_BYTES_MAX: Final = 16 * MIB
"""What the length word of a frame may say; inclusive."""
BLIPMQ_LOGIN_FRAME_BYTES_MAX: Final = 9 + 2 + 65_535
"""The same before AUTH has succeeded: the longest AUTH there can be."""
BLIPMQ_BAD_KEYS_MAX: Final = 5
"""Wrong keys on one connection; the last of them closes it."""
BLIPMQ_REPLIES_OWED_MAX: Final = 4_096
"""Replies of one connection that wait for earlier publishes to be durable, before its socket is no longer read."""
BLIPMQ_SUBSCRIPTIONS_MAX: Final = 20_000
"""Of all connections together, those whose connection is gone included."""

# Figg
FIGG_TOPIC_BYTES_MAX: Final = 1 * KIB
"""What the topic field of a frame may hold; whether the name is a good one is the broker's question."""

# RustLog
RUSTLOG_FRAME_BYTES_MAX: Final = 10 * MIB
"""The payload of one frame in either direction; inclusive."""
RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX: Final = 8 * KIB
"""The payload of one frame from a peer that has no right at all, where access is enforced; inclusive."""
RUSTLOG_DECODE_STEP_BYTES: Final = 64 * KIB
"""JSON records that are decoded in one turn of the event loop. Those of a larger Produce are decoded in several."""
RUSTLOG_PRODUCE_RECORDS_MAX: Final = 250_000
"""Records of one Produce: so many offsets of 20 digits still fit the JSON reply."""
RUSTLOG_REPLY_BYTES_MAX: Final = OUTPUT_BUFFER_BYTES_MAX - OUTPUT_HIGH_WATER_BYTES
"""A reply to a Fetch with more than one record: with what may be unsent before it, it fits the output buffer of a peer."""
FETCHES_AT_ONCE_MAX: Final = 16
"""Fetches of all FlyMQ and RustLog connections that are read and encoded at once: what they hold is not part of any output yet."""
TURN_BYTES_MIN: Final = 64 * KIB
"""Payload of a reply from which on its connection waits for its turn before it is encoded."""
RUSTLOG_ERROR_CHARS_MAX: Final = 8_192
"""A longer error text is cut: it may quote a name of megabytes, and must fit a frame and a u16 length."""
RUSTLOG_REQUESTS_IN_FLIGHT_MAX: Final = 1_024
"""Pipelined Produce requests of one connection on their way to the disk before its socket is no longer read."""
RUSTLOG_STALL_SECONDS_MAX: Final = 30.0
"""How long a peer may stop in the middle of a frame."""
RUSTLOG_STRAY_OFFSETS_MAX: Final = 10_000
"""Offsets committed for topics that do not exist, all connections together."""

# FlyMQ
FLYMQ_PAYLOAD_BYTES_MAX: Final = 32 * MIB
"""One frame without its header, and what a compressed payload may grow to: the specification's maximum message size."""
FLYMQ_LOGIN_INFLATED_BYTES_MAX: Final = 8 * KIB
"""What a compressed payload may grow to before somebody has logged in, where access is enforced."""
FLYMQ_LOOP_INFLATED_BYTES_MAX: Final = 64 * KIB
"""What a compressed payload may grow to on the event loop. A larger one is unpacked on a thread."""
FLYMQ_LOOP_INFLATED_BYTES_TOTAL: Final = 1 * MIB
"""The same for everything that came in one piece, before other connections have their turn."""
FLYMQ_INFLATIONS_MAX: Final = 2
"""Payloads that are unpacked on threads at once, of all connections together; of one connection it is one."""
FLYMQ_FETCH_BYTES_MAX: Final = 4 * MIB
"""A FETCH reply of more than one record; a single record may fill the frame."""
FLYMQ_SCAN_BYTES_MAX: Final = 256 * MIB
"""What a FETCH with a filter looks at in search of its first record."""

# Fujin
FUJIN_NAME_BYTES_MAX: Final = 1 * KIB
"""The name of a writer or reader, and a writer id; which topic it means is the configuration's question."""
FUJIN_MESSAGE_BYTES_MAX: Final = 1 * MIB
"""The value of one WRITE; inclusive. A longer one is skipped and refused."""
FUJIN_ID_BYTES_MAX: Final = 1 * KIB
"""A message id in an ACK or NACK. Ours are far shorter."""
FUJIN_IDS_MAX: Final = 65_536
"""Message ids in one ACK or NACK."""
FUJIN_FETCH_RECORDS_MAX: Final = 5_000
"""Messages in one reply to a FETCH, however many it asks for."""
FUJIN_FETCHES_MAX: Final = 1_024
"""FETCHes of one stream that wait at once before the stream is no longer read."""
FUJIN_ERROR_BYTES_MAX: Final = 8 * KIB
"""A longer error text is cut."""

# QUIC
QUIC_STREAM_WINDOW_BYTES: Final = 1 * MIB
"""What a peer may have sent on one stream that nobody has used yet."""
QUIC_CONNECTION_WINDOW_BYTES: Final = 16 * MIB
"""The same for all streams of a connection together."""
QUIC_STREAMS_MAX: Final = 1_000
"""Streams that one connection may have open at once."""
QUIC_UNPROVEN_MAX: Final = 100
"""Unfinished handshakes on one address, before a client has to show that it is where it says it is."""
QUIC_PING_SECONDS: Final = 5.0
"""From the answer to one ping to the next."""
QUIC_PONG_SECONDS_MAX: Final = 5.0
"""How long a peer may take to answer a ping."""

# Flight endpoint
FLIGHT_CONNECTIONS_MAX: Final = 1_024
"""Open connections to the Flight endpoint."""
FLIGHT_REQUEST_BYTES_MAX: Final = 4 * MIB
"""A ticket, a command or the body of an action."""
FLIGHT_READ_ROWS_MAX: Final = 1 << 20
"""Rows of one record batch, whatever a reader asks for."""
FLIGHT_BATCH_BYTES_TARGET: Final = 16 * MIB
"""Keys and values of one record batch on its way out; more only if a single record has more."""
FLIGHT_READ_AHEAD_BYTES: Final = 4 * MIB - 64 * KIB
"""What is read from the log while the batches before it are being sent: a reader holds about twice this."""
FLIGHT_IN_FLIGHT_BYTES_MAX: Final = 32 * MIB
"""Records of one put that are on their way to the disk before the next are read from its connection."""
FLIGHT_IN_FLIGHT_BYTES_MIN: Final = 4 * MIB
"""The same where many put at once."""
FLIGHT_IN_FLIGHT_BYTES_TOTAL: Final = 256 * MIB
"""What all puts share, as long as each of them has the least."""
FLIGHT_SCHEMAS_BYTES_MAX: Final = 1 * MIB
"""What an answer holds of other versions of a schema."""
FLIGHT_PUT_ROWS_MAX: Final = 1 << 24
"""Rows of one record batch that is put: rows of nulls take no bytes on their way."""
FLIGHT_UNPACKED_BYTES_MAX: Final = 256 * MIB
"""What a column of one record batch that is put may take once it is plain: a dictionary says a large value in four bytes."""
FLIGHT_CALLS_MAX: Final = 128
"""Calls that are served at once, each on a thread of its own."""
FLIGHT_CALLS_RESERVED: Final = 8
"""Calls beyond them that only administrators may make."""
FLIGHT_OPENING_CALLS_MAX: Final = 32
"""Calls whose peer has sent its headers, and not yet what it wants to write: each holds a thread."""
FLIGHT_OPENING_SECONDS_MAX: Final = 10.0
"""How long a peer may take from the headers of such a call to its first message. Later ones lose their connection."""
FLIGHT_CHECK_SECONDS: Final = 1.0
"""How often the connections of the Flight endpoint are counted."""
FLIGHT_LOGINS_PENDING_MAX: Final = 10_000
"""Logins whose first call has not come yet; the oldest goes first."""
FLIGHT_LOGIN_PENDING_SECONDS_MAX: Final = 60.0
"""How long the first call of a login may take to come."""
FLIGHT_STALL_SECONDS_MAX: Final = 600.0
"""How long a call may wait for a peer that neither reads nor writes, once somebody else wants its place: a task that is busy with its next
rows is no enemy, and would only come again and push out another."""
FLIGHT_WAITS_MAX: Final = 96
"""How many of them may be waiting for records to come: the rest is kept for those who have something to do."""
FLIGHT_TOKENS_MAX: Final = 10_000
"""Logins that are remembered; the oldest goes first."""
FLIGHT_TOKEN_SECONDS_MAX: Final = 3_600.0
"""How long a login is good for."""

# Schemas
SCHEMA_BYTES_MAX: Final = 256 * KIB
"""The definition of one version."""
SCHEMA_DEPTH_MAX: Final = 64
"""How deep its parts may lie in each other."""
SCHEMA_PARTS_MAX: Final = 10_000
"""Its parts, each counted as often as it is referred to: what one value may cost at most, in steps of the validator."""
SCHEMA_COMPARISONS_MAX: Final = 20_000
"""Pairs of parts that are compared to prove two versions compatible. What takes more counts as not proven."""
SCHEMA_VERSIONS_MAX: Final = 1_000
"""Versions of one schema."""
SCHEMAS_MAX: Final = 10_000
"""Versions of all schemas together."""
SCHEMA_FAULTS_MAX: Final = 8
"""What is said about one value that does not fit."""
SCHEMA_VALUE_DEPTH_MAX: Final = 100
"""How deep a value of Avro or Protobuf may be nested."""
SCHEMA_LOOP_STEPS_MAX: Final = 2_000_000
"""Steps of about 5 ns that checking the values of one request may take on the event loop. What may take more is checked by a process
of its own."""
SCHEMA_LOOP_DEFINITION_BYTES_MAX: Final = 4 * KIB
"""The definition that is compiled and compared on the event loop. A longer one goes to that process first."""
SCHEMA_CHECK_CPU_SECONDS_MAX: Final = 2
"""Processor time of that process for one check. What takes longer does not fit."""
SCHEMA_CHECK_SECONDS_MAX: Final = 30.0
"""How long a check may take by the clock, on a busy machine."""
SCHEMA_CHECK_MEMORY_BYTES_MAX: Final = 512 * MIB
"""Address space of that process."""
SCHEMA_CHECKS_WAITING_MAX: Final = 64
"""Checks that wait for that process. One more is told to come again."""
SCHEMA_CHECKS_BYTES_MAX: Final = 128 * MIB
"""Values that wait to be checked, and values whose verdict is remembered until they are published."""
SCHEMA_COMPILE_MS_MAX: Final = 500
"""Processor time that compiling one definition may take."""
JSON_VALUE_DEPTH_MAX: Final = 500
"""How deep a JSON value that has a schema may be nested: a bound of our own, because the parser's differs between versions of Python."""

# Access
USERS_MAX: Final = 100_000
ROLES_MAX: Final = 1_000
RULES_MAX: Final = 100_000
API_KEYS_MAX: Final = 100_000
SCOPES_PER_KEY_MAX: Final = 100
PASSWORD_CHARACTERS_MIN: Final = 8
PASSWORD_BYTES_MAX: Final = 1_024
PASSWORD_JOBS_RUNNING: Final = 2
"""Passwords that are hashed at once, each on a thread of its own."""
PASSWORD_JOBS_QUEUED_MAX: Final = 64
"""Passwords that wait to be hashed. One more is told to come again, and nothing is spent on it."""
LOGIN_PAUSE_MS_MAX: Final = 30_000
"""The longest pause after wrong passwords: whoever guesses at somebody's account locks them out for no longer."""
LOGINS_REMEMBERED_MAX: Final = 10_000
"""Accounts, and addresses, whose failed logins are remembered."""
AUDIT_EVENTS_WAITING_MAX: Final = 1_000
"""Events of the audit log on their way to the disk; beyond it denials are counted, not listed. Changes of access are never dropped."""
AUDIT_QUERY_EVENTS_MAX: Final = 10_000
"""Events in one answer to a query."""

# What a request may cost
REQUEST_CPU_MS_MAX: Final = 500
"""Processor time of the broker, however small the request."""
REQUEST_CPU_NS_PER_BYTE_MAX: Final = 1_000
"""What each byte of the request may add."""
REQUEST_MEMORY_BYTES_MAX: Final = 128 * MIB
"""Memory of the broker while it serves the request, however small that is."""
REQUEST_MEMORY_BYTES_ANONYMOUS_MAX: Final = 16 * MIB
"""The same for a peer that has not logged in, where access is enforced."""
REQUEST_MEMORY_BYTES_PER_BYTE_MAX: Final = 64
"""What each byte of the request may add."""
