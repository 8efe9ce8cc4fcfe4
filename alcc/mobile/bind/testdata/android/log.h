/* What the generated code needs of Android's log. */
#include <stdio.h>
#define ANDROID_LOG_INFO 4
#define ANDROID_LOG_FATAL 7
#define __android_log_print(priority, tag, ...) fprintf(stderr, __VA_ARGS__)
#define __android_log_vprint(priority, tag, format, args) vfprintf(stderr, format, args)
