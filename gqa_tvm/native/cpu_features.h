/* What this CPU offers, asked of the CPU and not of /proc/cpuinfo, a part of launcher.c. An emulator
 * or a sandbox may show the file of another machine. */
#ifndef GQA_TVM_CPU_FEATURES_H
#define GQA_TVM_CPU_FEATURES_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A bit of a word of `read_words`, by the name that Linux gives it in /proc/cpuinfo. `state`: register
 * state that the system must save with a thread for it (XCR0). */
typedef struct {
  const char* name;
  int word, bit;
  uint64_t state;
} Feature;

#if defined(__x86_64__)
#include <cpuid.h>

enum { LEAF1_ECX, LEAF7_EBX, LEAF7_ECX, LEAF7_EDX, LEAF7_1_EAX, WORDS };
enum { YMM = 0x6, ZMM = 0xE6, XCR0_READABLE = 1u << 27 };

static const Feature features[] = {
    {"fma", LEAF1_ECX, 12, YMM},          {"f16c", LEAF1_ECX, 29, YMM},
    {"avx", LEAF1_ECX, 28, YMM},          {"bmi1", LEAF7_EBX, 3, 0},
    {"avx2", LEAF7_EBX, 5, YMM},          {"bmi2", LEAF7_EBX, 8, 0},
    {"avx512f", LEAF7_EBX, 16, ZMM},      {"avx512dq", LEAF7_EBX, 17, ZMM},
    {"avx512cd", LEAF7_EBX, 28, ZMM},     {"avx512bw", LEAF7_EBX, 30, ZMM},
    {"avx512vl", LEAF7_EBX, 31, ZMM},     {"avx512_vbmi", LEAF7_ECX, 1, ZMM},
    {"avx512_vnni", LEAF7_ECX, 11, ZMM},  {"avx512_fp16", LEAF7_EDX, 23, ZMM},
    {"avx_vnni", LEAF7_1_EAX, 4, YMM},    {"avx512_bf16", LEAF7_1_EAX, 5, ZMM},
};

static uint64_t read_words(uint64_t words[WORDS]) {
  unsigned a, b, c, d, low = 0, high = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) words[LEAF1_ECX] = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    unsigned leaves = a;
    words[LEAF7_EBX] = b, words[LEAF7_ECX] = c, words[LEAF7_EDX] = d;
    if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words[LEAF7_1_EAX] = a;
  }
  if (words[LEAF1_ECX] & XCR0_READABLE) __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

enum { HWCAP, HWCAP2, WORDS };

static const Feature features[] = {
    {"asimd", HWCAP, 1, 0},    {"asimdhp", HWCAP, 10, 0}, {"asimddp", HWCAP, 20, 0},
    {"sve", HWCAP, 22, 0},     {"sve2", HWCAP2, 1, 0},    {"i8mm", HWCAP2, 13, 0},
    {"bf16", HWCAP2, 14, 0},
};

static uint64_t read_words(uint64_t words[WORDS]) {
  words[HWCAP] = getauxval(AT_HWCAP), words[HWCAP2] = getauxval(AT_HWCAP2);
  return 0;
}

#else

enum { WORDS = 1 };

static const Feature features[] = {{"", 0, 0, 0}};

static uint64_t read_words(uint64_t words[WORDS]) { return words[0] = 0; }

#endif

static bool cpu_has(const char* name, size_t length) {
  uint64_t words[WORDS] = {0};
  uint64_t state = read_words(words);
  for (size_t i = 0; i < sizeof features / sizeof *features; ++i) {
    const Feature* f = &features[i];
    if (strlen(f->name) == length && memcmp(f->name, name, length) == 0)
      return (words[f->word] >> f->bit & 1) != 0 && (state & f->state) == f->state;
  }
  return false;
}

/* A name that is not known here is one that the CPU has not. */
static bool cpu_has_all(const char* names) {
  for (size_t length; *names != '\0'; names += length) {
    length = strcspn(names, " ");
    if (length == 0)
      length = 1;
    else if (!cpu_has(names, length))
      return false;
  }
  return true;
}

#endif
