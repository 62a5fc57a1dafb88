/* Reads the scenario file and answers what it says of an instant. Times are whole nanoseconds, counters whole numbers: exact. */
#include "scenario.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

Scenario scenario;

typedef struct { volatile int64_t now_ns, is_virtual, release; } Control; /* the layout that control.py writes */
static Control *control;
static int64_t started_ns;

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int real_time(void) { return control == NULL || !control->is_virtual; }
int64_t clock_ns(void) { return real_time() ? monotonic_ns() - started_ns : control->now_ns; }
int released(void) { return control != NULL && control->release; }

static uint32_t hashed(uint32_t hash, const char *text) { /* FNV-1a */
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash;
}

uint32_t key_of(const char *name) { return hashed(2166136261u, name); }

uint32_t numbered_key(const char *name, unsigned number) {
    char digits[12] = "", *digit = digits + sizeof digits - 1;
    do *--digit = (char)('0' + number % 10); while (number /= 10);
    *--digit = '.';
    return hashed(key_of(name), digit);
}

static void fail(const char *why, const char *what) {
    fprintf(stderr, "fake nvml: scenario: %s: %s\n", why, what);
    _exit(97);
}

static int64_t ns_of(const char *seconds) { return (int64_t)(strtold(seconds, NULL) * 1e9L + 0.5L); }

/* --- values over time ------------------------------------------------------------------------------------------------- */

Series *series_of(Device *device, uint32_t key) {
    for (int i = 0; i < device->series_count; i++)
        if (device->key[i] == key) return &device->series[i];
    return NULL;
}

static uint64_t id_of(unsigned field, unsigned scope) { return (uint64_t)field << 32 | scope; }

Series *field_of(Device *device, unsigned field, unsigned scope) {
    uint64_t id = id_of(field, scope);
    for (int i = 0; i < device->series_count; i++)
        if (device->id[i] == id) return &device->series[i];
    return NULL;
}

static int64_t grown(int64_t rate, int64_t ns) { return (int64_t)((__int128)rate * ns / 1000000000); }

int64_t whole(const Series *series, int64_t at) {
    int64_t value = 0;
    for (int i = 0; i < series->steps && (i == 0 || series->step[i].at <= at); i++) {
        const Step *step = &series->step[i], *next = i + 1 < series->steps ? step + 1 : NULL;
        int64_t until = next && next->at < at ? next->at : at;
        if (step->sets) value = step->value;
        if (until > step->at) value += grown(step->rate, until - step->at);
    }
    return series->bits && series->bits < 63 ? value & ((1ll << series->bits) - 1) : value;
}

double fraction(const Series *series, int64_t at) {
    double value = 0;
    for (int i = 0; i < series->steps && (i == 0 || series->step[i].at <= at); i++)
        value = series->step[i].fraction + series->step[i].fraction_rate * (double)(at - series->step[i].at) / 1e9;
    return value;
}

int driver_epoch(int64_t at, int *code) {
    int epoch = 0;
    *code = 0;
    for (int i = 0; i < scenario.epochs && scenario.epoch_at[i] <= at; i++) {
        epoch++;
        *code = at < scenario.epoch_back[i] ? scenario.epoch_code[i] : 0;
    }
    return epoch;
}

/* --- what a call does before it answers -------------------------------------------------------------------------------- */

static void sleep_ns(int64_t ns) {
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    nanosleep(&left, NULL);
}

static void hang(int64_t until) {
    while (clock_ns() < until && !released()) sleep_ns(1000000);
}

void take_time(int64_t ns) {
    if (ns && real_time()) sleep_ns(ns);
}

static nvmlReturn_t follow(const Rule *rule, int64_t at, nvmlReturn_t code, int64_t *latency) {
    if (rule->kind == LATENCY_RULE) *latency = rule->until; /* the last one that fits wins */
    if (rule->kind == HANG_RULE && at < rule->until) hang(rule->until);
    return rule->kind == ERROR_RULE ? (nvmlReturn_t)rule->code : code;
}

nvmlReturn_t enter(Device *device, const char *call) {
    uint32_t key = key_of(call);
    int64_t at = clock_ns(), latency = 0;
    nvmlReturn_t code = NVML_SUCCESS;
    for (int i = 0; i < device->rules; i++) {
        const Rule *rule = &device->rule[i];
        if (!rule->field && (!rule->call || rule->call == key) && rule->at <= at) code = follow(rule, at, code, &latency);
    }
    take_time(latency);
    return code == NVML_SUCCESS && device->parent ? enter(device->parent, "*") : code;
}

nvmlReturn_t enter_field(Device *device, unsigned field, int64_t *latency) {
    int64_t at = clock_ns(), own = 0;
    nvmlReturn_t code = NVML_SUCCESS;
    for (int i = 0; i < device->rules; i++)
        if (device->rule[i].field == field && device->rule[i].at <= at) code = follow(&device->rule[i], at, code, &own);
    *latency += own;
    return code;
}

/* --- the file ------------------------------------------------------------------------------------------------------------ */

static Series *made_series(Device *device, const char *name) {
    Series *series = series_of(device, key_of(name));
    if (series) return series;
    if (device->series_count == MOST_SERIES) fail("too many series", name);
    int place = device->series_count++;
    series = &device->series[place];
    device->key[place] = key_of(name);
    series->type = UNSCALED;
    unsigned field;
    char scope[16] = "";
    if (sscanf(name, "field.%u:%15s", &field, scope) >= 1)
        device->id[place] = id_of(field, !strcmp(scope, "all") ? EVERY_LINK : (unsigned)strtoul(scope, NULL, 10));
    return series;
}

static void set_value(Device *device, int64_t at, char **word, int words) {
    Series *series = made_series(device, word[0]);
    if (series->steps == MOST_STEPS) fail("too many steps", word[0]);
    Step *step = &series->step[series->steps++];
    step->at = at;
    step->sets = strcmp(word[1], "-") != 0; /* "-": goes on from where it is */
    step->value = step->sets ? (int64_t)strtoull(word[1], NULL, 10) : 0;
    step->fraction = strtod(word[1], NULL);
    for (int i = 2; i + 1 < words; i += 2) {
        if (!strcmp(word[i], "rate")) step->rate = strtoll(word[i + 1], NULL, 10), step->fraction_rate = strtod(word[i + 1], NULL);
        else if (!strcmp(word[i], "bits")) series->bits = atoi(word[i + 1]);
        else if (!strcmp(word[i], "type")) series->type = atoi(word[i + 1]);
        else fail("no such word", word[i]);
    }
}

static void add_rule(Device *device, int kind, const char *call, int64_t at, int code, int64_t until) {
    if (device->rules == MOST_RULES) fail("too many rules", call);
    Rule *rule = &device->rule[device->rules++];
    unsigned field = strncmp(call, "field.", 6) ? 0 : (unsigned)strtoul(call + 6, NULL, 10);
    *rule = (Rule){strcmp(call, "*") ? key_of(call) : 0, kind, code, field, at, until};
    device->field_rules |= field != 0;
}

static void apply(Device *device, int64_t at, char **word, int words) {
    const char *verb = word[0];
    if (!strcmp(verb, "set") && words > 2) set_value(device, at, word + 1, words - 1);
    else if (!strcmp(verb, "error") && words == 3) add_rule(device, ERROR_RULE, word[1], at, atoi(word[2]), 0);
    else if (!strcmp(verb, "latency") && words == 3) add_rule(device, LATENCY_RULE, word[1], at, 0, ns_of(word[2]));
    else if (!strcmp(verb, "hang") && words == 3)
        add_rule(device, HANG_RULE, word[1], at, 0, strcmp(word[2], "released") ? at + ns_of(word[2]) : INT64_MAX);
    else if (!strcmp(verb, "process") && words == 3 && device->processes < MOST_PROCESSES) {
        device->process[device->processes].pid = (unsigned)strtoul(word[1], NULL, 10);
        device->process[device->processes++].bytes = strcmp(word[2], "none") ? strtoull(word[2], NULL, 10) : ~0ull;
    } else if (!strcmp(verb, "xid") && words == 2 && device->xids < MOST_XIDS) {
        device->xid[device->xids].at = at;
        device->xid[device->xids++].code = strtoull(word[1], NULL, 10);
    } else if (!strcmp(verb, "uuid") && words == 2) snprintf(device->uuid, sizeof device->uuid, "%s", word[1]);
    else if (!strcmp(verb, "pci") && words == 2) snprintf(device->pci, sizeof device->pci, "%s", word[1]);
    else if (!strcmp(verb, "mig") && words == 2) {
        for (device->migs = 0; device->migs < atoi(word[1]) && device->migs < MOST_MIG; device->migs++) {
            Device *mig = calloc(1, sizeof *mig);
            mig->parent = device;
            mig->index = device->migs;
            snprintf(mig->uuid, sizeof mig->uuid, "MIG-fake-%d-%d", device->index, device->migs);
            snprintf(mig->name, sizeof mig->name, "%.80s MIG", device->name);
            device->mig[device->migs] = mig;
        }
    } else fail("cannot be read", verb);
}

static void on_devices(char **word, int words, int64_t at, const char *rest) {
    int first, last, mig = -1;
    if (!strcmp(word[1], "*")) first = 0, last = MOST_DEVICES - 1;
    else if (sscanf(word[1], "%d.%d", &first, &mig) == 2 || sscanf(word[1], "%d-%d", &first, &last) == 2) last = mig < 0 ? last : first;
    else first = last = atoi(word[1]);
    for (int i = first; i <= last && i < MOST_DEVICES; i++) {
        Device *device = mig < 0 ? &scenario.device[i] : scenario.device[i].mig[mig];
        if (device == NULL) fail("no such MIG device", word[1]);
        if (!strcmp(word[2], "name")) snprintf(device->name, sizeof device->name, "%s", rest);
        else apply(device, at, word + 2, words - 2);
    }
}

static void read_line(char *line) {
    char *word[48], *rest = line, copy[512];
    int words = 0, skip = 0;
    int64_t at = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *next = strtok(copy, " \n"); next && words < 48; next = strtok(NULL, " \n")) word[words++] = next;
    if (words == 0 || word[0][0] == '#') return;
    if (!strcmp(word[0], "at") && words > 2) at = ns_of(word[1]), skip = 2;
    char **w = word + skip;
    int n = words - skip;
    line[strcspn(line, "\n")] = 0;
    for (int i = 0; i < skip + 3 && rest; i++) rest = strchr(rest, ' ') ? strchr(rest, ' ') + 1 : NULL;
    if (!strcmp(w[0], "gpu") && n > 2) on_devices(w, n, at, rest ? rest : "");
    else if (!strcmp(w[0], "count") && n == 2) scenario.count = atoi(w[1]);
    else if (!strcmp(w[0], "count_told") && n == 2) scenario.told = (int)strtoll(w[1], NULL, 10);
    else if (!strcmp(w[0], "driver") && n == 2) snprintf(scenario.driver, sizeof scenario.driver, "%s", w[1]);
    else if (!strcmp(w[0], "nvml") && n == 2) snprintf(scenario.nvml, sizeof scenario.nvml, "%s", w[1]);
    else if (!strcmp(w[0], "init"))
        for (int i = 1; i < n && scenario.init_codes < 32; i++) scenario.init_code[scenario.init_codes++] = atoi(w[i]);
    else if (!strcmp(w[0], "driver_gone") && n == 3 && scenario.epochs < 16) {
        scenario.epoch_at[scenario.epochs] = at;
        scenario.epoch_code[scenario.epochs] = atoi(w[1]);
        scenario.epoch_back[scenario.epochs++] = strcmp(w[2], "never") ? at + ns_of(w[2]) : INT64_MAX;
    } else fail("cannot be read", w[0]);
}

void load_scenario(void) {
    const char *path = getenv("FAKE_NVML_SCENARIO"), *controlled = getenv("FAKE_NVML_CONTROL");
    started_ns = monotonic_ns();
    scenario.count = 1;
    strcpy(scenario.driver, "575.57.08");
    strcpy(scenario.nvml, "12.575.57.08");
    for (int i = 0; i < MOST_DEVICES; i++) {
        Device *device = &scenario.device[i];
        device->index = i;
        snprintf(device->name, sizeof device->name, "Fake GPU");
        snprintf(device->uuid, sizeof device->uuid, "GPU-fake-%d", i);
        snprintf(device->pci, sizeof device->pci, "00000000:%02X:00.0", 0x10 + i);
    }
    if (controlled) {
        int file = open(controlled, O_RDWR);
        if (file < 0) fail("no control file", controlled);
        control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (control == MAP_FAILED) fail("cannot be mapped", controlled);
    }
    FILE *file = path ? fopen(path, "r") : NULL;
    if (path && !file) fail("cannot be opened", path);
    char line[512];
    while (file && fgets(line, sizeof line, file)) read_line(line);
    if (file) fclose(file);
}
