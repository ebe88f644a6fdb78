// The calls that came with newer drivers; a part of nvml.c.
#pragma once

API int nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2* info) {
    BEGIN(device);
    if (info->version != 0x02000028) return MISMATCH;
    info->total = device->memory_bytes;
    info->used = (unsigned long long)value_at(MEMORY, now);
    info->reserved = 1ULL << 29;
    info->free = info->total - info->used - info->reserved;
    return SUCCESS;
}

API int nvmlDeviceGetTemperatureV(Device device, struct temperature* temperature) {
    BEGIN(device);
    temperature->value = (int)value_at(TEMPERATURE, now);
    return SUCCESS;
}

GPU_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, value_at(REASONS, now))

API int nvmlGpmQueryDeviceSupport(Device device, struct gpm_support* support) {
    BEGIN(device);
    if (support->version != 1) return MISMATCH;
    support->supported = device->has_gpm;
    return SUCCESS;
}

API int nvmlGpmSampleAlloc(struct gpm_sample** sample) {
    BEGIN(NULL);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

API int nvmlGpmSampleFree(struct gpm_sample* sample) {
    BEGIN(NULL);
    free(sample);
    return SUCCESS;
}

static int take(Device device, struct gpm_sample* sample, double now) {
    if (!device->has_gpm) return NOT_SUPPORTED;
    sample->at = now;
    for (int column = 0; column < REASONS; column++) sample->sums[column] = integral(column, now);
    return SUCCESS;
}

API int nvmlGpmSampleGet(Device device, struct gpm_sample* sample) {
    BEGIN(device);
    NOT_ON_MIG(device);
    return take(device, sample, now);
}

API int nvmlGpmMigSampleGet(Device device, unsigned instance, struct gpm_sample* sample) {
    BEGIN(device);
    for (int i = 0; i < script.count; i++)
        if (script.devices[i].parent == number(device) && script.devices[i].instance == instance)
            return take(device, sample, now);
    return INVALID_ARGUMENT;
}

API int nvmlGpmMetricsGet(struct gpm_request* request) {
    BEGIN(NULL);
    if (request->version != 1) return MISMATCH;
    const double span = request->second->at - request->first->at;
    if (span <= 0.1) return INVALID_ARGUMENT;  // too close to each other, or in the wrong order
    for (unsigned i = 0; i < request->count; i++) {
        struct gpm_metric* metric = &request->metrics[i];
        char name[16] = "metric:20";
        int column = -1;
        switch (metric->id) {
            case 2:
                column = SM, strcpy(name, "metric:2");
                break;
            case 3:
                column = OCCUPANCY, strcpy(name, "metric:3");
                break;
            case 10:
                column = DRAM, strcpy(name, "metric:10");
                break;
            case 20:
                column = TX;
                break;
            case 21:
                column = RX, strcpy(name, "metric:21");
                break;
        }
        metric->status = column < 0 ? NOT_SUPPORTED : script_error(name, -1, now);
        if (column < 0) continue;
        metric->value = (request->second->sums[column] - request->first->sums[column]) / span;
        if (column == RX || column == TX) metric->value *= 1e9 / (1 << 20);  // in MiB/s
    }
    return SUCCESS;
}
