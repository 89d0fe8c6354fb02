/* NVIDIA's management library for tests: one card, whose answers are in the environment variable NVML_PERSONA, one a
 * line: FUNCTION=VALUE. Without the variable there is no driver; a function without a line is not supported. "!N" is
 * the error with number N. Built by tests/fakes/nvml/__init__.py, and called through the real pynvml. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { LONGEST = 512 };

typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;
typedef struct { unsigned long long total, free, used; } memory_t;

static int opened = 0;

int fake_opened(void) { return opened; }

static int answer(const char *function, char *value) {
    const char *line = getenv("NVML_PERSONA");
    size_t length = strlen(function);
    while (line != NULL && *line != '\0') {
        size_t size = strcspn(line, "\n");
        if (strncmp(line, function, length) == 0 && line[length] == '=' && size - length - 1 < LONGEST) {
            memcpy(value, line + length + 1, size - length - 1);
            value[size - length - 1] = '\0';
            return value[0] == '!' ? atoi(value + 1) : SUCCESS;
        }
        line += size + (line[size] == '\n');
    }
    return NOT_SUPPORTED;
}

static int text(const char *function, char *buffer, unsigned int size) {
    char value[LONGEST];
    int result = answer(function, value);
    if (result == SUCCESS) snprintf(buffer, size, "%s", value);
    return result;
}

static int number(const char *function, unsigned int *found) {
    char value[LONGEST];
    int result = answer(function, value);
    if (result == SUCCESS) *found = (unsigned int)strtoul(value, NULL, 0);
    return result;
}

static int long_number(const char *function, unsigned long long *found) {
    char value[LONGEST];
    int result = answer(function, value);
    if (result == SUCCESS) *found = strtoull(value, NULL, 0);
    return result;
}

/* "PID:BYTES,PID:BYTES"; the driver says "not available" by the largest number. */
static int processes(const char *function, unsigned int *count, process_t *list) {
    char value[LONGEST], *rest = value;
    unsigned int room = *count, number = 0;
    int result = answer(function, value);
    if (result != SUCCESS) return result;
    for (char *part; (part = strsep(&rest, ",")) != NULL && *part != '\0'; number++)
        if (list != NULL && number < room)
            list[number] = (process_t){strtoul(part, NULL, 10), strtoull(strchr(part, ':') + 1, NULL, 10), 0, 0};
    *count = number;
    return number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    if (getenv("NVML_PERSONA") == NULL) return DRIVER_NOT_LOADED;
    opened++;
    return SUCCESS;
}
int nvmlShutdown(void) { opened--; return SUCCESS; }
int nvmlSystemGetDriverVersion(char *buffer, unsigned int size) { return text("nvmlSystemGetDriverVersion", buffer, size); }
int nvmlDeviceGetCount_v2(unsigned int *count) { return number("nvmlDeviceGetCount", count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = &opened;
    return index == 0 ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetUUID(void *device, char *buffer, unsigned int size) {
    (void)device;
    return text("nvmlDeviceGetUUID", buffer, size);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char value[LONGEST];
    *device = &opened;
    return answer("nvmlDeviceGetUUID", value) == SUCCESS && strcmp(uuid, value) == 0 ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetName(void *device, char *buffer, unsigned int size) {
    (void)device;
    return text("nvmlDeviceGetName", buffer, size);
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    char value[LONGEST];
    int result = answer("nvmlDeviceGetMemoryInfo", value);
    (void)device;
    if (result == SUCCESS && sscanf(value, "%llu,%llu", &memory->total, &memory->used) == 2)
        memory->free = memory->total - memory->used;
    return result;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    char value[LONGEST];
    int result = answer("nvmlDeviceGetCudaComputeCapability", value);
    (void)device;
    if (result == SUCCESS) sscanf(value, "%d,%d", major, minor);
    return result;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *mhz) {
    (void)device;
    return number(type == 1 ? "nvmlDeviceGetClockInfo(SM)" : "nvmlDeviceGetClockInfo(MEM)", mhz);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    (void)device, (void)sensor;
    return number("nvmlDeviceGetTemperature", celsius);
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) {
    (void)device;
    return number("nvmlDeviceGetEnforcedPowerLimit", milliwatts);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    (void)device;
    return long_number("nvmlDeviceGetCurrentClocksThrottleReasons", reasons);
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    (void)device;
    return long_number("nvmlDeviceGetTotalEnergyConsumption", millijoules);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *list) {
    (void)device;
    return processes("nvmlDeviceGetComputeRunningProcesses", count, list);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned int *count, process_t *list) {
    (void)device;
    return processes("nvmlDeviceGetGraphicsRunningProcesses", count, list);
}
int nvmlDeviceGetDriverModel(void *device, unsigned int *current, unsigned int *pending) {
    (void)device;
    *pending = 0;
    return number("nvmlDeviceGetDriverModel", current);
}
int nvmlDeviceGetDriverModel_v2(void *device, unsigned int *current, unsigned int *pending) {
    (void)device;
    *pending = 0;
    return number("nvmlDeviceGetDriverModel_v2", current);
}
