/* order.h -- ZR_EMULATE chooses the order of work that may run in any order.
 *
 *   ZR_EMULATE=eager          at once, in the order of issue; threads and blocks ascending
 *   ZR_EMULATE=late           as late as a wait allows; threads and blocks descending
 *   ZR_EMULATE=shuffled:SEED  at random, as a function of SEED alone
 */
#ifndef SHIM_ORDER_H
#define SHIM_ORDER_H

enum order_mode { ORDER_EAGER, ORDER_LATE, ORDER_SHUFFLED };

order_mode order_now(void);                 /* eager if ZR_EMULATE is not set */
unsigned order_choice(unsigned n);          /* 0 .. n - 1, random if shuffled, else 0 */
void order_of(unsigned *order, unsigned n); /* 0 .. n - 1, each once */
int order_backwards(void);

#endif
