/* A rotary embedding in C, to be checked by pyrope: base 10000, features paired as (i, i + d/2), float32.
 *
 *     cc -O2 -o my_rope my_rope.c -lm
 *     ./my_rope x.npy positions.npy y.npy
 *
 * A .npy file, version 1.0: "\x93NUMPY", 1, 0, two bytes of header length, a header that ends in a newline, the data. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char *header; size_t start, bytes; char *data; long shape[8]; int axes; } Array;

static void fail(const char *what, const char *path) { fprintf(stderr, "%s: %s\n", what, path); exit(1); }

static Array load(const char *path, const char *dtype) {
    Array a = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot open", path);
    unsigned char magic[10];
    if (fread(magic, 1, 10, file) != 10 || memcmp(magic, "\x93NUMPY\x01", 7)) fail("no .npy file", path);
    size_t length = magic[8] + 256u * magic[9];
    a.header = calloc(length + 1, 1);
    if (fread(a.header, 1, length, file) != length) fail("cut short", path);
    if (!strstr(a.header, dtype) || !strstr(a.header, "'fortran_order': False")) fail("another dtype or order", path);
    char *at = strchr(strstr(a.header, "'shape'"), '(') + 1;
    a.bytes = dtype[2] == 'f' ? 4 : 8;
    while (*at != ')') {
        a.shape[a.axes++] = strtol(at, &at, 10);
        a.bytes *= (size_t)a.shape[a.axes - 1];
        while (*at == ',' || *at == ' ') at++;
    }
    a.start = 10 + length;
    a.data = malloc(a.bytes ? a.bytes : 1);
    if (fread(a.data, 1, a.bytes, file) != a.bytes) fail("cut short", path);
    fclose(file);
    return a;
}

int main(int count, char **path) {
    if (count != 4) fail("usage", "my_rope x.npy positions.npy y.npy");
    Array x = load(path[1], "'<f4'"), positions = load(path[2], "'<i8'");
    long d = x.shape[x.axes - 1], n = x.shape[x.axes - 2], heads = (long)(x.bytes / 4) / (n * d);
    for (long h = 0; h < heads; h++)
        for (long j = 0; j < n; j++) {
            float *row = (float *)x.data + (h * n + j) * d;
            double m = (double)((long long *)positions.data)[j];
            for (long i = 0; i < d / 2; i++) {
                double angle = m * pow(10000.0, -2.0 * i / d), c = cos(angle), s = sin(angle);
                double a = row[i], b = row[i + d / 2];
                row[i] = (float)(a * c - b * s);
                row[i + d / 2] = (float)(b * c + a * s);
            }
        }
    FILE *file = fopen(path[3], "wb"), *model = fopen(path[1], "rb"); /* y has the header of x */
    char *head = malloc(x.start);
    if (!file || !model || fread(head, 1, x.start, model) != x.start) fail("cannot write", path[3]);
    fwrite(head, 1, x.start, file);
    fwrite(x.data, 1, x.bytes, file);
    return fclose(file) != 0;
}
