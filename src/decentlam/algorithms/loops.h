/* The loops for one precision: REAL is its type, NAMED(loop) the name of a loop. See loops.c.

   All memory but g is that of a whole bucket, of which a loop takes `size` elements from `start` on;
   g has that many. */

/* out = the weighted sum of the terms, of at most BLOCK elements. Two terms of weight 1 together are
   a line between them, as in torch.lerp: where both are equal, so is the mix. The same holds of what
   a pair of nodes has with messages of 16 bits: the whole message, the other's and minus its own. */
static inline void NAMED(mix)(REAL *restrict out, size_t start, size_t size, const Mix *mix) {
    const double *weights = mix->weights;
    const int line = mix->count == 2 && fabs(weights[0] + weights[1] - 1) < 1e-15;
    if (line && mix->kinds[0] == WHOLE && mix->kinds[1] == WHOLE) {
        const REAL *restrict first = (const REAL *)mix->terms[0] + start;
        const REAL *restrict second = (const REAL *)mix->terms[1] + start;
        const REAL to_second = weights[1], to_first = 1 - weights[1];
        if (weights[1] < 0.5)
            for (size_t i = 0; i < size; i++)
                out[i] = first[i] + to_second * (second[i] - first[i]);
        else
            for (size_t i = 0; i < size; i++)
                out[i] = second[i] - to_first * (second[i] - first[i]);
        return;
    }
    float theirs[BLOCK], own[BLOCK];
    const int rounded = mix->count == 3 && weights[0] == 1 && weights[1] == -weights[2];
    if (rounded && mix->kinds[0] == WHOLE && mix->kinds[1] != WHOLE && mix->kinds[2] != WHOLE) {
        const REAL *restrict whole = (const REAL *)mix->terms[0] + start;
        const REAL weight = weights[1];
        widen(theirs, (const uint16_t *)mix->terms[1] + start, size, mix->kinds[1]);
        widen(own, (const uint16_t *)mix->terms[2] + start, size, mix->kinds[2]);
        for (size_t i = 0; i < size; i++)
            out[i] = whole[i] + weight * ((REAL)theirs[i] - own[i]);
        return;
    }
    for (size_t i = 0; i < size; i++)
        out[i] = 0;
    for (size_t k = 0; k < mix->count; k++) {
        const REAL weight = weights[k];
        if (mix->kinds[k] == WHOLE) {
            const REAL *restrict term = (const REAL *)mix->terms[k] + start;
            for (size_t i = 0; i < size; i++)
                out[i] += weight * term[i];
        } else {
            widen(theirs, (const uint16_t *)mix->terms[k] + start, size, mix->kinds[k]);
            for (size_t i = 0; i < size; i++)
                out[i] += weight * theirs[i];
        }
    }
}

/* message = x - lr (g + decay x) - kept v, without v if that is NULL; whether all of it is finite. */
VECTORIZED int NAMED(message)(REAL *restrict message, const REAL *restrict x,
                              const REAL *restrict g, const REAL *restrict v, size_t start,
                              size_t size, double lr_, double decay_, double kept_) {
    const REAL lr = lr_, decay = decay_, kept = kept_;
    int bad = 0;
    message += start, x += start;
    if (v == NULL)
        for (size_t i = 0; i < size; i++) {
            const REAL z = x[i] - lr * (g[i] + decay * x[i]);
            message[i] = z;
            bad |= !(z - z == 0);
        }
    else
        for (size_t i = 0; i < size; i++) {
            const REAL z = x[i] - lr * (g[i] + decay * x[i]) - kept * v[start + i];
            message[i] = z;
            bad |= !(z - z == 0);
        }
    return !bad;
}

/* v = kept v + x - mix;  x = x - v */
VECTORIZED void NAMED(update)(REAL *restrict x, REAL *restrict v, size_t start, size_t size,
                              const Mix *mix, double kept_) {
    const REAL kept = kept_;
    REAL mixed[BLOCK];
    for (size_t stop = start + size; start < stop; start += BLOCK) {
        const size_t here = stop - start < BLOCK ? stop - start : BLOCK;
        NAMED(mix)(mixed, start, here, mix);
        for (size_t i = 0; i < here; i++) {
            const size_t at = start + i;
            v[at] = kept * v[at] + (x[at] - mixed[i]);
            x[at] = x[at] - v[at];
        }
    }
}

/* s = slow s + fast (sent - mix);  v = kept v + lr (g + decay x) + share (sent - mix) + rest s
   x = mix */
VECTORIZED void NAMED(steady_update)(REAL *restrict x, const REAL *restrict g, REAL *restrict v,
                                     REAL *restrict s, const REAL *restrict sent, size_t start,
                                     size_t size, const Mix *mix, double lr_, double decay_,
                                     double kept_, double slow_, double fast_, double share_,
                                     double rest_) {
    const REAL lr = lr_, decay = decay_, kept = kept_;
    const REAL slow = slow_, fast = fast_, share = share_, rest = rest_;
    REAL mixed[BLOCK];
    for (size_t stop = start + size; start < stop; start += BLOCK, g += BLOCK) {
        const size_t here = stop - start < BLOCK ? stop - start : BLOCK;
        NAMED(mix)(mixed, start, here, mix);
        for (size_t i = 0; i < here; i++) {
            const size_t at = start + i;
            const REAL taken = sent[at] - mixed[i];
            s[at] = slow * s[at] + fast * taken;
            v[at] = kept * v[at] + lr * (g[i] + decay * x[at]) + share * taken + rest * s[at];
            x[at] = mixed[i];
        }
    }
}
