/* A libnvidia-ml.so.1 without a GPU: the functions that pynvml calls for Handrail, answered from a scenario file.
 *
 * FAKE_NVML_SCENARIO names the file, FAKE_NVML_CONTROL a mapped file with a virtual clock and a release flag (control.py).
 * Signatures and codes are nvml.h's, which this is compiled against; no behaviour here was copied from a driver. */
#include "scenario.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int references, init_calls, session_epoch;

__attribute__((constructor)) static void begin(void) { load_scenario(); }

/* --- the session --------------------------------------------------------------------------------------------------------- */

static nvmlReturn_t initialise(void) {
    int code, epoch = driver_epoch(clock_ns(), &code);
    pthread_mutex_lock(&lock);
    if (references == 0) {
        if (!code && scenario.init_codes) code = scenario.init_code[init_calls < scenario.init_codes ? init_calls : scenario.init_codes - 1];
        init_calls++;
        session_epoch = epoch;
    }
    if (!code || references) references++;
    pthread_mutex_unlock(&lock);
    return references ? NVML_SUCCESS : (nvmlReturn_t)code;
}

nvmlReturn_t nvmlInit_v2(void) { return initialise(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return initialise(); }

nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = references ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (references) references--;
    pthread_mutex_unlock(&lock);
    return code;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

static nvmlReturn_t alive(void) {
    int code;
    if (!references) return NVML_ERROR_UNINITIALIZED;
    if (driver_epoch(clock_ns(), &code) != session_epoch) return code ? (nvmlReturn_t)code : NVML_ERROR_UNINITIALIZED;
    return NVML_SUCCESS;
}

/* Before any answer: is there a session, and what does the scenario do to this call. */
#define BEGIN(handle, call)                                                    \
    Device *device = (Device *)(handle);                                       \
    nvmlReturn_t said = alive();                                               \
    if (said == NVML_SUCCESS) said = device ? enter(device, call) : NVML_ERROR_INVALID_ARGUMENT; \
    if (said != NVML_SUCCESS) return said

static nvmlReturn_t text(const char *from, char *to, unsigned length) {
    if (strlen(from) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, from);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { return text(scenario.driver, version, length); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) { return text(scenario.nvml, version, length); }
nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    char known[32];
    snprintf(known, sizeof known, "process-%u", pid);
    return text(known, name, length);
}

/* --- which devices -------------------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)(scenario.told ? scenario.told : scenario.count); return alive(); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
    if (alive() != NVML_SUCCESS) return alive();
    if (index >= (unsigned)scenario.count) return NVML_ERROR_INVALID_ARGUMENT;
    *handle = (nvmlDevice_t)&scenario.device[index];
    return enter(&scenario.device[index], "HandleByIndex");
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
    for (int i = 0; i < scenario.count; i++)
        if (!strcmp(uuid, scenario.device[i].uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *index) {
    BEGIN(handle, "Index");
    *index = (unsigned)device->index;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned length) { BEGIN(handle, "UUID"); return text(device->uuid, uuid, length); }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned length) { BEGIN(handle, "Name"); return text(device->name, name, length); }

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci) {
    BEGIN(handle, "PciInfo");
    memset(pci, 0, sizeof *pci);
    snprintf(pci->busId, sizeof pci->busId, "%s", device->pci);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending) {
    BEGIN(handle, "MigMode");
    *current = *pending = device->migs > 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *count) { BEGIN(handle, "MaxMigDeviceCount"); *count = MOST_MIG; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *mig) {
    BEGIN(handle, "MigDeviceHandleByIndex");
    if (index >= (unsigned)device->migs) return NVML_ERROR_NOT_FOUND;
    *mig = (nvmlDevice_t)device->mig[index];
    return NVML_SUCCESS;
}

/* --- one number a call ------------------------------------------------------------------------------------------------------ */

static nvmlReturn_t number_at(Device *device, uint32_t key, int64_t *value) {
    const Series *series = series_of(device, key);
    if (!series) return NVML_ERROR_NOT_SUPPORTED;
    *value = whole(series, clock_ns());
    return NVML_SUCCESS;
}

static nvmlReturn_t number(Device *device, const char *name, int64_t *value) { return number_at(device, key_of(name), value); }

#define NUMBER(function, call, series_name)                          \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned *value) {    \
        BEGIN(handle, call);                                         \
        int64_t found;                                               \
        said = number(device, series_name, &found);                  \
        if (said == NVML_SUCCESS) *value = (unsigned)found;          \
        return said;                                                 \
    }

NUMBER(nvmlDeviceGetPowerUsage, "PowerUsage", "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "EnforcedPowerLimit", "power.limit")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "MaxPcieLinkGeneration", "pcie.generation.max")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "CurrPcieLinkGeneration", "pcie.generation")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "MaxPcieLinkWidth", "pcie.width.max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "CurrPcieLinkWidth", "pcie.width")

static nvmlReturn_t one_of(nvmlDevice_t handle, const char *call, const char *what, unsigned which, unsigned *value) {
    BEGIN(handle, call);
    int64_t found;
    said = number_at(device, numbered_key(what, which), &found);
    if (said == NVML_SUCCESS) *value = (unsigned)found;
    return said;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, nvmlTemperatureSensors_t sensor, unsigned *value) { return one_of(handle, "Temperature", "temperature", sensor, value); }
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t handle, nvmlClockType_t type, unsigned *value) { return one_of(handle, "ClockInfo", "clock", type, value); }
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t handle, nvmlClockType_t type, unsigned *value) { return one_of(handle, "MaxClockInfo", "clock.max", type, value); }
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t handle, nvmlPcieUtilCounter_t counter, unsigned *value) { return one_of(handle, "PcieThroughput", "pcie.throughput", counter, value); }

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *rates) {
    BEGIN(handle, "UtilizationRates");
    int64_t gpu, memory = 0;
    said = number(device, "utilization", &gpu);
    if (said != NVML_SUCCESS) return said;
    number(device, "utilization.memory", &memory);
    rates->gpu = (unsigned)gpu;
    rates->memory = (unsigned)memory;
    return NVML_SUCCESS;
}

static nvmlReturn_t memory_of(Device *device, int64_t *total, int64_t *used, int64_t *reserved) {
    nvmlReturn_t said = number(device, "memory.total", total);
    *used = *reserved = 0;
    number(device, "memory.used", used);
    number(device, "memory.reserved", reserved);
    return said;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    BEGIN(handle, "MemoryInfo");
    int64_t total, used, reserved;
    said = memory_of(device, &total, &used, &reserved);
    if (said == NVML_SUCCESS) memory->total = (unsigned long long)total, memory->used = (unsigned long long)(used + reserved), memory->free = (unsigned long long)(total - used - reserved);
    return said;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    BEGIN(handle, "MemoryInfo_v2");
    int64_t total, used, reserved;
    said = memory_of(device, &total, &used, &reserved);
    if (said != NVML_SUCCESS) return said;
    memory->total = (unsigned long long)total;
    memory->used = (unsigned long long)used;
    memory->reserved = (unsigned long long)reserved;
    memory->free = (unsigned long long)(total - used - reserved);
    return NVML_SUCCESS;
}

static nvmlReturn_t reasons(nvmlDevice_t handle, const char *call, const char *name, unsigned long long *bits) {
    BEGIN(handle, call);
    int64_t found;
    said = number(device, name, &found);
    if (said == NVML_SUCCESS) *bits = (unsigned long long)found;
    return said;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t handle, unsigned long long *bits) { return reasons(handle, "CurrentClocksEventReasons", "reasons", bits); }
nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t handle, unsigned long long *bits) { return reasons(handle, "SupportedClocksEventReasons", "reasons.supported", bits); }

/* The name before 12.2; nvml.h makes a macro or a deprecated declaration of it. */
#undef nvmlDeviceGetCurrentClocksThrottleReasons
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t handle, unsigned long long *bits) { return reasons(handle, "CurrentClocksThrottleReasons", "reasons", bits); }

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t *status) {
    BEGIN(one, "P2PStatus");
    char name[48];
    int64_t found = NVML_P2P_STATUS_OK;
    snprintf(name, sizeof name, "p2p.%d.%u", ((Device *)other)->index, index);
    number(device, name, &found);
    *status = (nvmlGpuP2PStatus_t)found;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_t *found) {
    BEGIN(handle, "ComputeRunningProcesses");
    unsigned room = *count;
    *count = (unsigned)device->processes;
    if (room < *count) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        memset(&found[i], 0, sizeof found[i]);
        found[i].pid = device->process[i].pid;
        found[i].usedGpuMemory = device->process[i].bytes;
    }
    return NVML_SUCCESS;
}

/* --- field values --------------------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, nvmlFieldValue_t *values) {
    BEGIN(handle, "FieldValues");
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t at = clock_ns(), latency = 0; /* a field may have a latency, a hang or an error of its own */
    for (int i = 0; i < count; i++) {
        const Series *series = field_of(device, values[i].fieldId, values[i].scopeId);
        values[i].timestamp = (long long)wall.tv_sec * 1000000 + wall.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].nvmlReturn = series ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        if (series && device->field_rules) values[i].nvmlReturn = enter_field(device, values[i].fieldId, &latency);
        if (values[i].nvmlReturn != NVML_SUCCESS) continue;
        values[i].valueType = series->type == UNSCALED ? NVML_VALUE_TYPE_UNSIGNED_LONG_LONG : (nvmlValueType_t)series->type;
        memset(&values[i].value, 0xa5, sizeof values[i].value); /* what the type does not cover is garbage */
        switch (values[i].valueType) {
            case NVML_VALUE_TYPE_DOUBLE: values[i].value.dVal = fraction(series, at); break;
            case NVML_VALUE_TYPE_UNSIGNED_INT: values[i].value.uiVal = (unsigned)whole(series, at); break;
            case NVML_VALUE_TYPE_SIGNED_INT: values[i].value.siVal = (int)whole(series, at); break;
            case NVML_VALUE_TYPE_UNSIGNED_SHORT: values[i].value.usVal = (unsigned short)whole(series, at); break;
            default: values[i].value.ullVal = (unsigned long long)whole(series, at);
        }
    }
    take_time(latency);
    return NVML_SUCCESS;
}

/* --- GPM ---------------------------------------------------------------------------------------------------------------------- */

struct nvmlGpmSample_st { int64_t at; Device *device; };

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t handle, nvmlGpmSupport_t *support) {
    BEGIN(handle, "GpmQueryDeviceSupport");
    support->isSupportedDevice = 0;
    if (series_of(device, key_of("gpm.2"))) support->isSupportedDevice = 1;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) { *sample = calloc(1, sizeof **sample); return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY; }
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) { free(sample); return NVML_SUCCESS; }

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t handle, nvmlGpmSample_t sample) {
    BEGIN(handle, "GpmSampleGet");
    sample->at = clock_ns();
    sample->device = device;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    if (get->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (!get->sample1->device || get->sample1->device != get->sample2->device) return NVML_ERROR_INVALID_ARGUMENT;
    BEGIN((nvmlDevice_t)get->sample2->device, "GpmMetricsGet");
    int close = get->sample2->at - get->sample1->at < 100000000; /* nvml.h: more than 100 ms apart */
    for (unsigned i = 0; i < get->numMetrics; i++) {
        const Series *series = series_of(device, numbered_key("gpm", get->metrics[i].metricId));
        get->metrics[i].nvmlReturn = series ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        if (series) get->metrics[i].value = close ? -7e9 : fraction(series, get->sample2->at);
    }
    return NVML_SUCCESS;
}

/* --- events ------------------------------------------------------------------------------------------------------------------- */

struct nvmlEventSet_st { int64_t since[MOST_DEVICES]; int registered[MOST_DEVICES], seen[MOST_DEVICES]; };

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) { *set = calloc(1, sizeof **set); return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { free(set); return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types, nvmlEventSet_t set) {
    BEGIN(handle, "RegisterEvents");
    if (!(types & nvmlEventTypeXidCriticalError)) return NVML_ERROR_NOT_SUPPORTED;
    set->registered[device->index] = 1;
    set->since[device->index] = clock_ns();
    return NVML_SUCCESS;
}

static int next_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (int i = 0; i < scenario.count; i++) {
        Device *device = &scenario.device[i];
        while (set->registered[i] && set->seen[i] < device->xids && device->xid[set->seen[i]].at <= clock_ns()) {
            int event = set->seen[i]++;
            if (device->xid[event].at < set->since[i]) continue; /* from before it was registered */
            memset(data, 0, sizeof *data);
            data->device = (nvmlDevice_t)device;
            data->eventType = nvmlEventTypeXidCriticalError;
            data->eventData = device->xid[event].code;
            return 1;
        }
    }
    return 0;
}

/* Whether one may still come: a driver wakes who waits, this one has to look whether the scenario's clock was moved. */
static int events_to_come(nvmlEventSet_t set) {
    for (int i = 0; i < scenario.count; i++)
        if (set->registered[i] && set->seen[i] < scenario.device[i].xids) return 1;
    return 0;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    unsigned step_ms = timeout_ms < 100 || !events_to_come(set) ? timeout_ms : 100;
    struct timespec step = {step_ms / 1000, (long)(step_ms % 1000) * 1000000};
    for (unsigned waited = 0;; waited += step_ms) {
        if (alive() != NVML_SUCCESS) return alive();
        if (next_event(set, data)) return NVML_SUCCESS;
        if (waited >= timeout_ms) return NVML_ERROR_TIMEOUT;
        nanosleep(&step, NULL);
    }
}
