// A libnvidia-ml.so.1 for tests: a script and a timeline stand for the driver and its GPUs (see script.c).
//
// Structures are declared here by their layout; no header of the vendor is needed. With OLD_DRIVER it lacks what
// drivers before about 535 lack.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "script.h"

#define API __attribute__((visibility("default")))

enum {
    SUCCESS,
    UNINITIALIZED,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE,
    MISMATCH = 25,
    HANG = 1000
};

typedef struct device* Device;

union value {
    double d;
    unsigned ui;
    unsigned long long ull;
};
struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct utilization {
    unsigned gpu, memory;
};
struct sample {
    unsigned long long time_us;
    union value value;
};
struct field {
    unsigned id, scope;
    long long time_us, latency_us;
    unsigned type;
    int status;
    union value value;
};
struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};
struct temperature {
    unsigned version, sensor;
    int value;
};
struct gpm_support {
    unsigned version, supported;
};
struct gpm_sample {
    double at;
    double sums[COLUMNS];
};
struct gpm_metric {
    unsigned id;
    int status;
    double value;
    const char *short_name, *long_name, *unit;
};
struct gpm_request {
    unsigned version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

static int sessions;

static int number(Device device) {
    return device ? (int)(device - script.devices) : -1;
}

// How a call begins: it is logged, and ends here where the script or the missing session says so.
#define BEGIN(device)                                            \
    if (!sessions) return UNINITIALIZED;                         \
    const double now = script_now();                             \
    script_log(__func__, number(device));                        \
    {                                                            \
        int error = script_error(__func__, number(device), now); \
        if (error == HANG)                                       \
            sleep(2);                                            \
        else if (error)                                          \
            return error;                                        \
    }                                                            \
    (void)now

// What the driver answers for whole GPUs only.
#define NOT_ON_MIG(device) \
    if ((device)->is_mig || (device)->mig_mode) return NOT_SUPPORTED

static int copy(char* to, unsigned length, const char* text) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!sessions) script_load();
    sessions++;
    int error = script_error(__func__, -1, script_now());
    if (error) sessions--;
    return error;
}
API int nvmlInit(void) {
    return nvmlInitWithFlags(0);
}
API int nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

API int nvmlShutdown(void) {
    if (!sessions) return UNINITIALIZED;
    script_log(__func__, -1);
    sessions--;
    return SUCCESS;
}

API const char* nvmlErrorString(int code) {
    return code ? "Scripted Error" : "Success";
}

API int nvmlSystemGetDriverVersion(char* version, unsigned length) {
    BEGIN(NULL);
    return copy(version, length, script.driver);
}

API int nvmlDeviceGetCount_v2(unsigned* count) {
    BEGIN(NULL);
    *count = 0;
    for (int i = 0; i < script.count; i++) *count += !script.devices[i].is_mig;
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
    BEGIN(NULL);
    for (int i = 0; i < script.count; i++)
        if (!script.devices[i].is_mig && index-- == 0) {
            *device = &script.devices[i];
            return script_error("handle", i, now);
        }
    return INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByUUID(const char* uuid, Device* device) {
    BEGIN(NULL);
    for (int i = 0; i < script.count; i++)
        if (strcmp(script.devices[i].uuid, uuid) == 0) {
            *device = &script.devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

API int nvmlDeviceGetName(Device device, char* name, unsigned length) {
    BEGIN(device);
    return copy(name, length, device->name);
}

API int nvmlDeviceGetUUID(Device device, char* uuid, unsigned length) {
    BEGIN(device);
    return copy(uuid, length, device->uuid);
}

API int nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
    BEGIN(device);
    *major = device->capability[0], *minor = device->capability[1];
    return SUCCESS;
}

API int nvmlDeviceGetMigMode(Device device, unsigned* current, unsigned* pending) {
    BEGIN(device);
    if (device->is_mig) return INVALID_ARGUMENT;
    if (device->capability[0] < 8) return NOT_SUPPORTED;
    *current = *pending = device->mig_mode;
    return SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned* count) {
    BEGIN(device);
    *count = 7;
    return SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device gpu, unsigned index, Device* device) {
    BEGIN(gpu);
    // The first place stays empty, as after an instance was destroyed.
    for (int i = 0; index > 0 && i < script.count; i++)
        if (script.devices[i].is_mig && script.devices[i].parent == number(gpu) && --index == 0) {
            *device = &script.devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device device, Device* gpu) {
    BEGIN(device);
    if (!device->is_mig) return INVALID_ARGUMENT;
    *gpu = &script.devices[device->parent];
    return SUCCESS;
}

API int nvmlDeviceGetGpuInstanceId(Device device, unsigned* instance) {
    BEGIN(device);
    if (!device->is_mig) return NOT_SUPPORTED;
    *instance = device->instance;
    return SUCCESS;
}

API int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned* state) {
    BEGIN(device);
    if (device->capability[0] < 9) return NOT_SUPPORTED;
    *state = link == 3;
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(Device device, struct memory* info) {
    BEGIN(device);
    info->total = device->memory_bytes;
    info->used = (unsigned long long)value_at(MEMORY, now) + (1ULL << 29);  // what the driver keeps counts as used
    info->free = info->total - info->used;
    return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(Device device, struct utilization* rates) {
    BEGIN(device);
    NOT_ON_MIG(device);
    rates->gpu = (unsigned)(value_at(UTIL, now) + 0.5), rates->memory = 0;
    return SUCCESS;
}

#define SAMPLES_A_SECOND 6
#define SAMPLES_KEPT 60

API int nvmlDeviceGetSamples(Device device, unsigned type, unsigned long long since_us, unsigned* value_type,
                             unsigned* count, struct sample* samples) {
    BEGIN(device);
    NOT_ON_MIG(device);
    if (type != 1) return INVALID_ARGUMENT;
    *value_type = 1;
    if (!samples) {
        *count = SAMPLES_KEPT;
        return SUCCESS;
    }
    const long newest = (long)(now * SAMPLES_A_SECOND);
    unsigned found = 0;
    for (long i = newest > SAMPLES_KEPT ? newest - SAMPLES_KEPT + 1 : 1; i <= newest && found < *count; i++) {
        const double at = (double)i / SAMPLES_A_SECOND;
        const unsigned long long time_us = script_realtime_us(at);
        // Realtime is derived anew at each call: a sample that was seen may seem a microsecond younger.
        if (time_us <= since_us + 1000) continue;
        samples[found].time_us = time_us;
        samples[found++].value.ui = (unsigned)(value_at(UTIL, at) + 0.5);
    }
    *count = found;
    return found ? SUCCESS : NOT_FOUND;
}

API int nvmlDeviceGetPcieThroughput(Device device, unsigned counter, unsigned* kb) {
    BEGIN(device);
    NOT_ON_MIG(device);
    usleep(20000);
    *kb = (unsigned)(value_at(counter ? RX : TX, now) * 1e6);
    return SUCCESS;
}

API int nvmlDeviceGetFieldValues(Device device, int count, struct field* fields) {
    BEGIN(device);
    NOT_ON_MIG(device);
    for (int i = 0; i < count; i++) {
        char name[32] = "field:197";
        if (fields[i].id == 198) strcpy(name, "field:198");
        fields[i].status =
            fields[i].id == 197 || fields[i].id == 198 ? script_error(name, number(device), now) : NOT_SUPPORTED;
        const enum column column = fields[i].id == 197 ? TX : RX;
        const bool reset = device->counter_reset > 0 && now >= device->counter_reset;
        const double bytes = (integral(column, now) - (reset ? integral(column, device->counter_reset) : 0)) * 1e9;
        const unsigned long long counter = (reset ? 0 : device->counter_start) + (unsigned long long)bytes;
        fields[i].time_us = script_realtime_us(now);
        fields[i].value.ull = ~0ULL;  // the upper half of a shorter value holds anything
        if (device->counter_bits == 32)
            fields[i].type = 1, fields[i].value.ui = (unsigned)counter;
        else
            fields[i].type = 3, fields[i].value.ull = counter;
    }
    return SUCCESS;
}

API int nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
    BEGIN(device);
    if (device->is_mig) return NOT_SUPPORTED;
    *milliwatts = (unsigned)(value_at(POWER, now) * 1000);
    return SUCCESS;
}

API int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long* millijoules) {
    BEGIN(device);
    if (device->is_mig) return NOT_SUPPORTED;
    *millijoules = 1000000 + (unsigned long long)(integral(POWER, now) * 1000);
    return SUCCESS;
}

API int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned* mhz) {
    BEGIN(device);
    if (type != 1 || device->is_mig) return INVALID_ARGUMENT;
    *mhz = (unsigned)value_at(CLOCK, now);
    return SUCCESS;
}

API int nvmlDeviceGetMaxClockInfo(Device device, unsigned type, unsigned* mhz) {
    BEGIN(device);
    if (type != 1 || device->is_mig) return INVALID_ARGUMENT;
    *mhz = device->max_clock;
    return SUCCESS;
}

// A call whose answer is one number of the GPU; MIG devices do not have it.
#define GPU_NUMBER(function, type, expression)    \
    API int function(Device device, type* out) {  \
        BEGIN(device);                            \
        if (device->is_mig) return NOT_SUPPORTED; \
        *out = (type)(expression);                \
        return SUCCESS;                           \
    }

GPU_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, value_at(GENERATION, now))
GPU_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, value_at(WIDTH, now))
GPU_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, device->max_generation)
GPU_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, device->max_width)
GPU_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, value_at(REASONS, now))

API int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned* celsius) {
    BEGIN(device);
    (void)sensor;
    *celsius = (unsigned)value_at(TEMPERATURE, now);
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, struct process* processes) {
    BEGIN(device);
    const unsigned room = *count;
    *count = script.process_count;
    if (room < *count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        processes[i] = (struct process){.pid = script.processes[i], .memory = 1 << 20};
    return SUCCESS;
}

#ifndef OLD_DRIVER
#include "newer.h"
#endif
