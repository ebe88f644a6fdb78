// The script of a machine. $NVML_SCRIPT names a file of lines "key value..", '#' begins a comment:
//
//   driver 570.1               version of the driver
//   gpu NAME UUID              adds a GPU; '_' in the name stands for a blank. Lines below are about the latest device:
//   mig GPU INSTANCE NAME UUID adds a MIG device of GPU number GPU
//   capability 9 0             memory_gib 141        gpm 1            max_link 5 16        max_clock 1980
//   counter BITS START         PCIe byte counters: 32 or 64 bits, and where they begin
//   counter_reset SECOND       when they begin anew at 0
//   process PID                a process that uses every device
//   error CALL CODE FROM_S DEVICE   CALL fails (or "*", "handle", "field:197", "metric:2") from then on; device -1: on
//                              all. The first line that fits counts; code 0 lets the call through, 1000 after
//                              two seconds
//   timeline FILE              CSV: a header with "t" and columns as below, then rows in order of time
//   epoch NS                   CLOCK_MONOTONIC at t = 0; without it, the first nvmlInit
//   clock FILE                 a file that holds t in seconds; it is read at every call
//   log FILE                   gets "CLOCK_MONOTONIC_NS THREAD CALL DEVICE" of every call
#define _GNU_SOURCE
#include "script.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_ROWS 256

struct script script;

static const char* const NAMES[COLUMNS] = {"util",    "sm",         "occupancy", "dram",      "rx_gbps",
                                           "tx_gbps", "power_w",    "memory",    "clock_mhz", "temperature",
                                           "reasons", "generation", "width"};
static const double DEFAULTS[COLUMNS] = {50, 40, 30, 20, 1, 2, 300, 1e9, 1500, 60, 0, 4, 16};

static double rows[MAX_ROWS][COLUMNS];
static double times[MAX_ROWS];
static int row_count;

static struct {
    char call[64];
    int code;
    double from;
    int device;
} errors[MAX_ERRORS];
static int error_count;

static long long epoch_ns;
static char clock_path[512], log_path[512];

static long long nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void load_timeline(const char* path) {
    FILE* file = fopen(path, "r");
    if (!file) abort();
    char line[1024];
    int columns[COLUMNS + 1], used = 0;  // -1: the time
    if (!fgets(line, sizeof line, file)) abort();
    for (char* word = strtok(line, ",\n"); word; word = strtok(NULL, ",\n")) {
        int column = -1;
        for (int i = 0; i < COLUMNS; i++)
            if (strcmp(word, NAMES[i]) == 0) column = i;
        if (column < 0 && strcmp(word, "t") != 0) abort();
        columns[used++] = column;
    }
    for (row_count = 0; row_count < MAX_ROWS && fgets(line, sizeof line, file); row_count++) {
        memcpy(rows[row_count], DEFAULTS, sizeof DEFAULTS);
        int i = 0;
        for (char* word = strtok(line, ",\n"); word && i < used; word = strtok(NULL, ",\n"), i++) {
            if (columns[i] < 0)
                times[row_count] = atof(word);
            else
                rows[row_count][columns[i]] = atof(word);
        }
    }
    fclose(file);
}

static struct device* add_device(const char* name, const char* uuid) {
    if (script.count == MAX_DEVICES) abort();
    struct device* device = &script.devices[script.count++];
    *device = (struct device){.capability = {8, 0}, .memory_bytes = 80ULL << 30, .parent = -1, .counter_bits = 64};
    device->max_generation = 4, device->max_width = 16, device->max_clock = 1980;
    snprintf(device->name, sizeof device->name, "%s", name);
    snprintf(device->uuid, sizeof device->uuid, "%s", uuid);
    for (char* c = device->name; *c; c++)
        if (*c == '_') *c = ' ';
    return device;
}

static void read_line(char* line) {
    char key[32], a[512], b[128];
    int parent, x, y;
    unsigned unsigned_x;
    struct device* device = script.count ? &script.devices[script.count - 1] : NULL;
    if (sscanf(line, "%31s", key) != 1 || key[0] == '#') return;
    const char* rest = strstr(line, key) + strlen(key);
    bool ok = true;
    if (strcmp(key, "gpu") == 0 && (ok = sscanf(rest, "%511s %127s", a, b) == 2)) {
        add_device(a, b);
    } else if (strcmp(key, "mig") == 0 && (ok = sscanf(rest, "%d %u %511s %127s", &parent, &unsigned_x, a, b) == 4)) {
        device = add_device(a, b);
        device->is_mig = true, device->parent = parent, device->instance = unsigned_x;
        script.devices[parent].mig_mode = true;
        device->memory_bytes = 16ULL << 30;
    } else if (strcmp(key, "driver") == 0) {
        ok = sscanf(rest, "%79s", script.driver) == 1;
    } else if (strcmp(key, "capability") == 0) {
        ok = device && sscanf(rest, "%d %d", &device->capability[0], &device->capability[1]) == 2;
    } else if (strcmp(key, "memory_gib") == 0 && (ok = device && sscanf(rest, "%d", &x) == 1)) {
        device->memory_bytes = (unsigned long long)x << 30;
    } else if (strcmp(key, "gpm") == 0 && (ok = device && sscanf(rest, "%d", &x) == 1)) {
        device->has_gpm = x;
    } else if (strcmp(key, "mig_mode") == 0 && (ok = device && sscanf(rest, "%d", &x) == 1)) {
        device->mig_mode = x;
    } else if (strcmp(key, "max_link") == 0) {
        ok = device && sscanf(rest, "%u %u", &device->max_generation, &device->max_width) == 2;
    } else if (strcmp(key, "max_clock") == 0) {
        ok = device && sscanf(rest, "%u", &device->max_clock) == 1;
    } else if (strcmp(key, "counter") == 0) {
        ok = device && sscanf(rest, "%u %llu", &device->counter_bits, &device->counter_start) == 2;
    } else if (strcmp(key, "counter_reset") == 0) {
        ok = device && sscanf(rest, "%lf", &device->counter_reset) == 1;
    } else if (strcmp(key, "process") == 0) {
        ok = sscanf(rest, "%u", &script.processes[script.process_count++]) == 1;
    } else if (strcmp(key, "error") == 0) {
        double from;
        ok = error_count < MAX_ERRORS && sscanf(rest, "%63s %d %lf %d", errors[error_count].call, &x, &from, &y) == 4;
        errors[error_count].code = x, errors[error_count].from = from, errors[error_count].device = y;
        error_count++;
    } else if (strcmp(key, "timeline") == 0 && (ok = sscanf(rest, "%511s", a) == 1)) {
        load_timeline(a);
    } else if (strcmp(key, "epoch") == 0) {
        ok = sscanf(rest, "%lld", &epoch_ns) == 1;
    } else if (strcmp(key, "clock") == 0) {
        ok = sscanf(rest, "%511s", clock_path) == 1;
    } else if (strcmp(key, "log") == 0) {
        ok = sscanf(rest, "%511s", log_path) == 1;
    } else {
        ok = false;
    }
    if (!ok) {
        fprintf(stderr, "NVML_SCRIPT: cannot read the line: %s", line);
        abort();
    }
}

void script_load(void) {
    memset(&script, 0, sizeof script);
    strcpy(script.driver, "570.1");
    row_count = error_count = 0;
    clock_path[0] = log_path[0] = '\0';
    epoch_ns = nanoseconds(CLOCK_MONOTONIC);
    const char* path = getenv("NVML_SCRIPT");
    FILE* file = path ? fopen(path, "r") : NULL;
    if (!file) return;  // a driver without a GPU
    char line[1024];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

double script_now(void) {
    if (clock_path[0]) {
        double now = 0;
        FILE* file = fopen(clock_path, "r");
        if (!file || fscanf(file, "%lf", &now) != 1) abort();
        fclose(file);
        return now;
    }
    return (nanoseconds(CLOCK_MONOTONIC) - epoch_ns) / 1e9;
}

long long script_realtime_us(double at) {
    if (clock_path[0]) return (long long)(at * 1e6) + 1;  // 0 means that there is no time
    return nanoseconds(CLOCK_REALTIME) / 1000 + (long long)((at - script_now()) * 1e6);
}

int script_error(const char* function, int device, double now) {
    for (int i = 0; i < error_count; i++) {
        bool named = strcmp(errors[i].call, function) == 0 || (strcmp(errors[i].call, "*") == 0 && device >= 0);
        bool concerned = errors[i].device < 0 || errors[i].device == device ||
                         (device >= 0 && errors[i].device == script.devices[device].parent);
        if (named && concerned && now >= errors[i].from) return errors[i].code;
    }
    return 0;
}

void script_log(const char* function, int device) {
    if (!log_path[0]) return;
    FILE* file = fopen(log_path, "a");
    if (!file) abort();
    fprintf(file, "%lld %d %s %d\n", nanoseconds(CLOCK_MONOTONIC), gettid(), function, device);
    fclose(file);
}

double value_at(enum column column, double at) {
    if (row_count == 0) return DEFAULTS[column];
    if (at <= times[0]) return rows[0][column];
    for (int i = 1; i < row_count; i++)
        if (at < times[i]) {
            if (column >= REASONS) return rows[i - 1][column];
            double share = (at - times[i - 1]) / (times[i] - times[i - 1]);
            return rows[i - 1][column] + share * (rows[i][column] - rows[i - 1][column]);
        }
    return rows[row_count - 1][column];
}

double integral(enum column column, double at) {
    double sum = 0, last = 0;  // from t = 0; what is interpolated between rows is exact by trapezoids
    for (int i = 0; i < row_count; i++)
        if (times[i] > last && times[i] < at) {
            sum += (times[i] - last) * (value_at(column, last) + value_at(column, times[i])) / 2;
            last = times[i];
        }
    return sum + (at - last) * (value_at(column, last) + value_at(column, at)) / 2;
}
