/* order.cpp -- reads ZR_EMULATE once and makes its random numbers. */
#include "order.h"
#include "shim.h"

#include <cstdlib>

namespace {

struct choices {
    order_mode mode;
    uint64_t state;
};

choices read_environment(void)
{
    const char *word = getenv("ZR_EMULATE");
    if (!word || !*word || !strcmp(word, "eager")) return {ORDER_EAGER, 0};
    if (!strcmp(word, "late")) return {ORDER_LATE, 0};
    char *end = nullptr;
    if (!strncmp(word, "shuffled:", 9)) {
        uint64_t seed = strtoull(word + 9, &end, 10);
        if (end > word + 9 && !*end) return {ORDER_SHUFFLED, seed};
    }
    shim_fail("ZR_EMULATE=%s; allowed: eager, late, shuffled:SEED", word);
}

choices &chosen(void)
{
    static choices c = read_environment();
    return c;
}

/* splitmix64 */
uint64_t draw(void)
{
    uint64_t x = chosen().state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

}

order_mode order_now(void) { return chosen().mode; }

unsigned order_choice(unsigned n)
{
    return n > 1 && order_now() == ORDER_SHUFFLED ? (unsigned)(draw() % n) : 0;
}

int order_backwards(void) { return order_now() == ORDER_LATE || order_choice(2); }

/* Forward, backward, or rotated: started anywhere, in either direction. */
void order_of(unsigned *order, unsigned n)
{
    unsigned first = order_choice(n), back = (unsigned)order_backwards();
    for (unsigned i = 0; i < n; i++) {
        unsigned at = (first + i) % n;
        order[i] = back ? n - 1 - at : at;
    }
}
