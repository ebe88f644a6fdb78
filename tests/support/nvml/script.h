// What a scripted machine is made of, and how its counters move. See script.c for the two files that describe it.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MAX_DEVICES 16
#define MAX_ERRORS 64
#define MAX_PROCESSES 16

// Columns of the timeline. The first group is interpolated and can be integrated, the second is not interpolated.
enum column {
    UTIL,
    SM,
    OCCUPANCY,
    DRAM,
    RX,
    TX,
    POWER,
    MEMORY,
    CLOCK,
    TEMPERATURE,
    REASONS,
    GENERATION,
    WIDTH,
    COLUMNS
};

struct device {
    char name[96];
    char uuid[96];
    int capability[2];
    unsigned long long memory_bytes;
    bool has_gpm;
    bool is_mig;
    bool mig_mode;
    int parent;             // of a MIG device: the number of its GPU
    unsigned instance;      // of a MIG device: its GPU instance
    unsigned counter_bits;  // of the PCIe byte counters
    unsigned long long counter_start;
    double counter_reset;  // when the counters begin anew at 0; 0: never
    unsigned max_generation, max_width, max_clock;
};

struct script {
    struct device devices[MAX_DEVICES];
    int count;
    unsigned processes[MAX_PROCESSES];
    int process_count;
    char driver[80];
};

extern struct script script;

// Reads $NVML_SCRIPT anew.
void script_load(void);

// Seconds since the script's epoch: by the clock file where there is one, else by CLOCK_MONOTONIC.
double script_now(void);

// The system's time in microseconds that belongs to a time of the script.
long long script_realtime_us(double at);

// The error that the script gives to a call now (device -1: of the whole library); 0 = none.
int script_error(const char* function, int device, double now);

// Writes a call to the log.
void script_log(const char* function, int device);

double value_at(enum column column, double at);
double integral(enum column column, double at);
