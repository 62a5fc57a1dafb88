"""Every span, attribute, resource, event and metric name that Handrail writes.

Each name is here once. ``gen_ai.*``, ``http.*``, ``server.*``, ``error.type``, ``host.*`` and ``service.*`` are OpenTelemetry
semantic conventions; names without a convention are under ``handrail.``. Times inside one process are integer nanoseconds since
the arrival of the request at that process, on that process's monotonic clock; their names end in ``_ns``.
"""

from typing import Final

# --- scopes (the emitting part) -------------------------------------------------------------------------------------------
SCOPE_PROXY: Final = "handrail.proxy"
SCOPE_PLUGIN: Final = "handrail.plugin"
SCOPE_EVENTS: Final = "handrail.events"  # log records
SCOPE_OWN: Final = "handrail.own"  # spans of Handrail's own work; no collector joins or stores them

# --- span names -----------------------------------------------------------------------------------------------------------
SPAN_REQUEST: Final = "handrail.request"  # SERVER, edge: the request as the client saw it
SPAN_PREFILL: Final = "prefill"  # SERVER, in front of P
SPAN_DECODE: Final = "decode"  # SERVER, in front of D
SPAN_PREFILL_QUEUE: Final = "prefill.queue"  # INTERNAL, at P: queued to scheduled; carries the record
SPAN_PREFILL_COMPUTE: Final = "prefill.compute"  # scheduled to first token; drawn
SPAN_DECODE_QUEUE: Final = "decode.queue"  # INTERNAL, at D: queued to scheduled; carries the record
SPAN_DECODE_FIRST_STEP: Final = "decode.first_step"  # scheduled to first token; drawn
SPAN_DECODE_STREAM: Final = "decode.stream"  # first token to finished; drawn
SPAN_KV_PUBLISH: Final = "kv.publish"  # PRODUCER
SPAN_KV_FETCH: Final = "kv.fetch"  # CONSUMER, child of kv.publish

# --- spans of Handrail's own work (scope ``handrail.own``) ---------------------------------------------------------------------
OWN_COMMIT: Final = "journal.commit"
OWN_SYNC: Final = "journal.sync"
OWN_ENTRY: Final = "pipeline.entry"
OWN_DECODE: Final = "pipeline.decode"
OWN_STITCH: Final = "pipeline.stitch"
OWN_DECIDE: Final = "pipeline.decide"
OWN_PUBLISH: Final = "store.publish"
OWN_UPKEEP: Final = "store.upkeep"  # its children are "store." and the step: store.compaction, store.retention
OWN_QUERY: Final = "api.query"
OWN_SPOOL: Final = "spool.append"
OWN_EXPORT: Final = "export.batch"  # CLIENT
OWN_PART_START: Final = "part.start"
OWN_PART_STOP: Final = "part.stop"
OWN_LATE: Final = "sample.late"
OWN_FREQUENT: Final = frozenset({OWN_COMMIT, OWN_ENTRY, OWN_DECIDE, OWN_SPOOL, OWN_EXPORT, OWN_LATE})
"""Operations of which ``own_traces.sample_ratio`` are traced; all others always are."""
OWN_STORE_STEP: Final = "store."
OWN_PART: Final = "handrail.part"
OWN_SIGNAL: Final = "handrail.signal"  # traces | logs | metrics
OWN_RECORDS: Final = "handrail.records"
OWN_BYTES: Final = "handrail.bytes"
OWN_SPANS: Final = "handrail.spans"
OWN_ROWS: Final = "handrail.rows"
OWN_REFUSED: Final = "handrail.refused"
OWN_DECIDED: Final = "handrail.decided"
OWN_FOLDER: Final = "handrail.store.folder"
OWN_SAMPLER: Final = "handrail.sampler"  # gpu | link
OWN_MISSED: Final = "handrail.missed"  # periods

# --- resource -------------------------------------------------------------------------------------------------------------
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"
PROCESS_PID: Final = "process.pid"
HOST_NAME: Final = "host.name"
HOST_ID: Final = "host.id"
ROLE: Final = "handrail.role"  # edge | router | prefill | decode | collocated
INSTANCE: Final = "handrail.instance"  # the observed process: the engine's or router's own host:port
SENDER_ID: Final = "handrail.sender.id"  # random, one a sidecar process start
CLUSTER: Final = "handrail.cluster"

# --- scope attributes -----------------------------------------------------------------------------------------------------
BATCH_SEQ: Final = "handrail.batch.seq"  # counts from 1 within one sender

# --- span attributes: conventions -----------------------------------------------------------------------------------------
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
GEN_AI_OPERATION: Final = "gen_ai.operation.name"  # chat | text_completion | responses | messages
GEN_AI_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# --- span attributes: Handrail's own --------------------------------------------------------------------------------------
SOURCE: Final = "handrail.source"  # proxy | plugin | middleware | otlp | metrics | log | ...
OUTCOME: Final = "handrail.outcome"  # records.Outcome
ERROR_CODE: Final = "handrail.error.code"
REQUEST_ID: Final = "handrail.request.id"  # the X-Request-Id header, clipped to 128 characters
REQUEST_ID_HASH: Final = "handrail.request.id_hash"  # BLAKE2b-64 of the whole header, only where it was clipped
REQUEST_ID_ADDED: Final = "handrail.request.id_added"  # true: the client sent none, we made one
REQUEST_KEY: Final = "handrail.request.key"
JOIN_KEY: Final = "handrail.join_key"  # what an OpenTelemetry Collector tier balances on
EXEMPLAR: Final = "handrail.exemplar"  # true: a metric points to this trace, so it is kept
STREAM: Final = "handrail.stream"
STREAM_REQUESTED: Final = "handrail.stream_asked"  # as the request body says; absent beyond the inspected part
CHOICES: Final = "handrail.choices"
TRACE_ORIGIN: Final = "handrail.trace.origin"  # trace_context.Origin
CLIENT_PARENT: Final = "handrail.trace.client_parent"
TIME_FORWARDED_NS: Final = "handrail.forwarded_ns"
TIME_REQUEST_DONE_NS: Final = "handrail.request_done_ns"
TIME_FIRST_BYTE_NS: Final = "handrail.ttfb_ns"
TIME_FIRST_TOKEN_NS: Final = "handrail.ttft_token_ns"
TIME_FIRST_TEXT_NS: Final = "handrail.ttft_text_ns"
FIRST_TEXT_KIND: Final = "handrail.ttft_text.kind"  # text | reasoning | tool_call | refusal
TIME_LAST_CONTENT_NS: Final = "handrail.last_content_ns"
TIME_FINISH_NS: Final = "handrail.finish_ns"
TIME_DURATION_NS: Final = "handrail.duration_ns"
TIME_FIRST_DELIVERED_NS: Final = "handrail.first_delivered_ns"
WRITE_BLOCKED_NS: Final = "handrail.write_blocked_ns"  # how long the client did not take bytes
CONTENT_ENCODING: Final = "handrail.content_encoding"
EVENTS: Final = "handrail.stream.events"  # chunks with content
GAP_UNIT: Final = "handrail.gap.unit"  # token | chunk
GAP_COUNT: Final = "handrail.gap.count"
GAP_SUM_NS: Final = "handrail.gap.sum_ns"
GAP_MAX_NS: Final = "handrail.gap.max_ns"
GAP_MAX_AT_NS: Final = "handrail.gap.max_at_ns"
GAP_SKETCH: Final = "handrail.gap.sketch"  # exponential_histogram.GapSketch.encode(): bytes
ITL_UNIT: Final = "handrail.itl.unit"  # as handrail.gap.*, per token: only where tokens per chunk are known
ITL_COUNT: Final = "handrail.itl.count"
ITL_SUM_NS: Final = "handrail.itl.sum_ns"
ITL_MAX_NS: Final = "handrail.itl.max_ns"
ITL_MAX_AT_NS: Final = "handrail.itl.max_at_ns"
ITL_SKETCH: Final = "handrail.itl.sketch"
STALL_COUNT: Final = "handrail.stall.count"  # gaps far above those around them (docs/stalls.md); the longest are span events
STALL_SUM_NS: Final = "handrail.stall.sum_ns"
STALL_TIMES: Final = "handrail.stall.times"  # stalls.pack_times(): bytes
STALL_HELD_NS: Final = (
    "handrail.stall.held_ns"  # of the span: nothing was read, since the client took nothing; of an event: in it
)
TPOT_MEAN_NS: Final = "handrail.tpot_mean_ns"
HINTS: Final = "handrail.hints"  # records.Hint values
INSPECTED: Final = "handrail.request.inspected"  # whole | partial | none
RETRY_COUNT: Final = "http.request.resend_count"

# kv_transfer_params as seen in the request (in) and in the response (out); the keys are the fields of records.KvParams
KV_IN: Final = "handrail.kv.in"
KV_OUT: Final = "handrail.kv.out"

# Records of the plugin: the prefix, then the field of the dataclass in records/ (``handrail.kv.fetch.bytes_moved``).
ENGINE_TIMES_PREFIX: Final = "handrail.engine."
KV_FETCH_PREFIX: Final = "handrail.kv.fetch."
KV_PUBLISH_PREFIX: Final = "handrail.kv.publish."
ITERATION_PREFIX: Final = "handrail.iteration."
PROCESS_EVENT_PREFIX: Final = "handrail.process."
ENGINE_FACTS_PREFIX: Final = "handrail.facts."
PARENT_SPAN_ID: Final = "handrail.parent_span_id"  # of a record that travels as a log record

# --- log records (event names, scope handrail.events) ---------------------------------------------------------------------
LOG_ENGINE_TIMES: Final = "handrail.engine.open"  # provisional EngineTimes
LOG_KV_FETCH: Final = "handrail.kv.fetch.open"  # provisional KvFetch
LOG_KV_PUBLISH: Final = "handrail.kv.publish.open"  # provisional KvPublish
LOG_ITERATION: Final = "handrail.iteration"
LOG_PROCESS_EVENT: Final = "handrail.process"
LOG_ENGINE_FACTS: Final = "handrail.facts"

# Facts from an engine's logs and metrics pages: log records of scope ``handrail.events``, metrics of scope ``handrail.samples``.
LOG_KV_LINE: Final = "handrail.kv.log"  # records.LogFact
LOG_SCHEMA: Final = "handrail.schema"  # records.SchemaReport
KV_LINE_PREFIX: Final = "handrail.log."
KV_LINE_NUMBERS: Final = "handrail.log.number."  # then the number's own name, which carries its unit
KV_LINE_WORDS: Final = "handrail.log.word."
SCHEMA_EMITTERS: Final = "handrail.schema.emitters"
SCHEMA_NOTES: Final = "handrail.schema."  # then the state: an array of "quantity|seen|expected"
SCOPE_METRICS: Final = "handrail.metrics"  # the sidecar's own page, sent to a backend
SCOPE_SAMPLES: Final = "handrail.samples"
METRIC_ENGINE: Final = "handrail_engine"  # then the quantity of records/quantities.py
ENGINE_LABEL: Final = "engine"  # on a data point: the engine's own label of that name
MODEL_LABEL: Final = "model_name"

# --- what a proxy counted (scope ``handrail.counts``) -------------------------------------------------------------------------
SCOPE_COUNTS: Final = "handrail.counts"
METRIC_FINISHED: Final = "handrail_finished_requests"  # by OUTCOME

# --- samples of devices (scope ``handrail.devices``); the tables in ``device_counters/`` name the counters -------------------
SCOPE_DEVICES: Final = "handrail.devices"
METRIC_GPU: Final = "handrail_gpu"  # then the counter of device_counters/gpu.py
METRIC_LINK: Final = "handrail_link"  # then the counter of device_counters/link.py
METRIC_DEVICE_READ: Final = "handrail_device_read"  # how long one reading took, ns; its attributes describe the device
HW_ID: Final = "hw.id"
HW_TYPE: Final = "hw.type"
HW_MODEL: Final = "hw.model"
HW_PARENT: Final = "hw.parent"
DEVICE_KIND: Final = "handrail.device.kind"  # records.devices.DeviceKind
DEVICE_INDEX: Final = "handrail.device.index"
DEVICE_PCI: Final = "handrail.device.pci"
DEVICE_LINE_RATE: Final = "handrail.device.line_rate_bytes"
DEVICE_ENGINE: Final = "handrail.device.engine"
DEVICE_LABEL: Final = "handrail.label"  # of a counter that no table names

# Counters of devices that the collector reads by name.
GPU_BUSY: Final = "utilization_ratio"  # share of the time in which any kernel ran
GPU_SM_ACTIVE: Final = "sm_active_ratio"
GPU_TENSOR_ACTIVE: Final = "tensor_active_ratio"
GPU_DRAM_ACTIVE: Final = "dram_active_ratio"
GPU_CLOCK: Final = "clock_hertz"  # by domain
GPU_THROTTLED: Final = "throttled"  # by reason
GPU_PCIE_BYTES: Final = "pcie_bytes"  # by direction
GPU_NVLINK_BYTES: Final = "nvlink_bytes"  # by direction
GPU_PCIE_LINE: Final = "pcie_line_bytes_per_second"
GPU_NVLINK_LINE: Final = "nvlink_line_bytes_per_second"
LINK_BYTES: Final = "bytes"  # by direction, of an RDMA port or a NIC
TRANSMIT: Final = "transmit"  # values of a direction
RECEIVE: Final = "receive"

# --- span events ----------------------------------------------------------------------------------------------------------
EVENT_STALL: Final = "handrail.stall"  # its time is the stall's end; with STALL_HELD_NS and these
STALL_GAP_NS: Final = "handrail.stall.gap_ns"
STALL_MEDIAN_NS: Final = "handrail.stall.median_ns"
STALL_INDEX: Final = "handrail.stall.index"
STALL_TURN: Final = "handrail.stall.turn"
EVENT_ERROR: Final = "handrail.stream_error"
EVENT_ABORT: Final = "handrail.abort"

# --- metrics: (name, unit, help) live in the part that emits them; prefixes here ------------------------------------------
METRIC_SIDECAR: Final = "handrail_sidecar"
METRIC_COLLECTOR: Final = "handrail_collector"
METRIC_TTFT: Final = "handrail_ttft_seconds"
METRIC_STREAM_GAP: Final = "handrail_stream_gap_seconds"
METRIC_ITL: Final = "handrail_itl_seconds"
METRIC_TPOT: Final = "handrail_tpot_seconds"
METRIC_E2E: Final = "handrail_e2e_seconds"
METRIC_REQUESTS: Final = "handrail_requests"
METRIC_REQUESTS_OPEN: Final = "handrail_requests_open"
METRIC_REQUEST_OLDEST_AGE: Final = "handrail_request_oldest_age_seconds"
METRIC_SLO: Final = "handrail_slo"
METRIC_KV: Final = "handrail_kv"  # then fetch or publish, and what of it
METRIC_CLOCK_BOUND: Final = "handrail_clock_bound_seconds"
METRIC_TLS: Final = "handrail_tls"  # of both processes, as the two below
METRIC_SECRET: Final = "handrail_secret"
METRIC_AUTH: Final = "handrail_auth"
METRIC_CONNECTIONS: Final = "handrail_connections"  # of both processes' listeners
METRIC_DESCRIPTORS: Final = "handrail_descriptors"
METRIC_STALLS: Final = "handrail_stalls"
METRIC_PHASES: Final = "handrail_phase_seconds"
METRIC_SLOW_PHASES: Final = "handrail_slow_phase_seconds"  # a counter: their sum
METRIC_SLOW_REQUESTS: Final = "handrail_slow_requests"
METRIC_FINDINGS: Final = "handrail_findings"
METRIC_JOINED: Final = "handrail_joined_requests"
METRIC_COUNTED: Final = "handrail_counted_requests"
METRIC_COVERAGE: Final = "handrail_trace_coverage_ratio"
METRIC_SLOW_LINK: Final = "handrail_link_slow"
