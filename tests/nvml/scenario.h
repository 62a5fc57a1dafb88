/* What a scenario file says, and the double's clock. The file's grammar is in scenario.py, which writes it. */
#ifndef HANDRAIL_SCENARIO_H
#define HANDRAIL_SCENARIO_H

#include <nvml.h>
#include <stdint.h>

enum { MOST_DEVICES = 16, MOST_MIG = 8, MOST_SERIES = 160, MOST_STEPS = 48, MOST_RULES = 64, MOST_PROCESSES = 16, MOST_XIDS = 64 };
enum { EVERY_LINK = 0xffffffffu, UNSCALED = -1 };

/* One value over time: from `at` on it is `value` (or goes on from where it was), and grows by `rate` a second. */
typedef struct { int64_t at, value, rate; double fraction, fraction_rate; int sets; } Step;
typedef struct {
    int bits, type, steps;        /* wraps at 2^bits; nvmlValueType_t or UNSCALED for what the call has */
    Step step[MOST_STEPS];
} Series;

enum { ERROR_RULE, HANG_RULE, LATENCY_RULE };
typedef struct { uint32_t call; int kind, code; unsigned field; int64_t at, until; } Rule; /* call 0: every one */

typedef struct Device {
    char name[96], uuid[80], pci[32];
    struct Device *parent, *mig[MOST_MIG];
    int index, migs, series_count, rules, field_rules, processes, xids;
    uint32_t key[MOST_SERIES];    /* of each series: hash of its name; apart from them, so that looking one up touches little memory */
    uint64_t id[MOST_SERIES];     /* of each series that is a field value: id_of its field and scope; else 0 */
    Series series[MOST_SERIES];
    Rule rule[MOST_RULES];
    struct { unsigned pid; unsigned long long bytes; } process[MOST_PROCESSES];
    struct { int64_t at; unsigned long long code; } xid[MOST_XIDS];
} Device;

typedef struct {
    char driver[80], nvml[80];
    int count, told, init_codes, init_code[32];
    int epochs, epoch_code[16];
    int64_t epoch_at[16], epoch_back[16];   /* the driver goes at, and is back at (INT64_MAX: never) */
    Device device[MOST_DEVICES];
} Scenario;

extern Scenario scenario;

void load_scenario(void);
int64_t clock_ns(void);                     /* of the double: virtual where a control file says so */
int real_time(void);
int released(void);
uint32_t key_of(const char *name);
uint32_t numbered_key(const char *name, unsigned number); /* of "name.number" */
Series *series_of(Device *device, uint32_t key);
Series *field_of(Device *device, unsigned field, unsigned scope);
int64_t whole(const Series *series, int64_t at);
double fraction(const Series *series, int64_t at);
int driver_epoch(int64_t at, int *code);    /* how many drivers have been there; *code: 0 while one is */
nvmlReturn_t enter(Device *device, const char *call); /* its latency, its hang, its error */
nvmlReturn_t enter_field(Device *device, unsigned field, int64_t *latency); /* as enter, but adds the latency up */
void take_time(int64_t ns);

#endif
